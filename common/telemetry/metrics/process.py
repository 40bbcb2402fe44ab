"""What every process says of itself: its build, its configuration, its start. Knows names; reads no clock."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from common.telemetry.metrics.families import Families

STARTUP_PHASES = ("weights", "cache", "warm-up", "workers")
"""As the start-up timeline shows them. A router waits for workers, a worker goes through the others."""


class ProcessMetrics:
    """Build, configuration and start-up of one process."""

    def __init__(self, families: Families) -> None:
        self._build = families.gauges(
            "dspark_build_info", "1, with the version that runs.", version=None, python=None
        )
        self._config = families.gauges(
            "dspark_config_info",
            "1 per setting that decides about capacity, with its value after defaults were filled in.",
            setting=None,
            value=None,
        )
        self._startup = families.gauges(
            "dspark_startup_duration_seconds",
            "How long each phase of this process's start took.",
            phase=STARTUP_PHASES,
        )
        self._load_bytes = families.counter(
            "dspark_weight_load_bytes_total", "Bytes of weights that were read from the checkpoint."
        )
        self._load_progress = families.gauge(
            "dspark_weight_load_progress_ratio",
            "Share of the weights that is in memory; 1 once the model is loaded.",
        )
        self._loaded_bytes = 0

    def describe_build(self, version: str) -> None:
        self._build.labels(version=version, python=platform.python_version()).set(1)

    def describe_config(self, settings: Mapping[str, object]) -> None:
        """Say what is configured; settings that were said before keep their place. Nothing here may be secret."""
        for setting, value in settings.items():
            self._config.remove(setting=setting)
            self._config.labels(setting=setting, value=str(value)).set(1)

    def started(self, phase_seconds: Mapping[str, float]) -> None:
        """How long phases of the start took."""
        for phase, seconds in phase_seconds.items():
            self._startup.labels(phase=phase).set(seconds)

    def loading(self, done_bytes: int, total_bytes: int) -> None:
        """Loading came so far. May be called from any one thread."""
        self._load_bytes.inc(max(0, done_bytes - self._loaded_bytes))
        self._loaded_bytes = done_bytes
        self._load_progress.set(done_bytes / total_bytes if total_bytes else 1.0)
