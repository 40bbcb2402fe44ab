"""A start as it goes: told part by part, shown by probes and metrics. Knows phases and a clock; starts nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from common.telemetry.metrics.process import ProcessMetrics
from common.telemetry.probes import Probes


class Startup:
    """The start of one process. Weights are loaded by threads, so any one thread may tell of it at a time."""

    def __init__(
        self,
        probes: Probes,
        metrics: ProcessMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._probes = probes
        self._metrics = metrics
        self._clock = clock
        self._phase: str | None = None
        self._began = 0.0

    def begin(self, phase: str) -> None:
        """The part before is over, and this one begins."""
        self.end()
        self._probes.begin(phase)
        self._phase, self._began = phase, self._clock()

    def loading(self, done_bytes: int, total_bytes: int) -> None:
        """So much of the weights is there."""
        self._metrics.loading(done_bytes, total_bytes)

    def end(self) -> None:
        """The last part is over."""
        if self._phase is not None:
            self._metrics.started({self._phase: self._clock() - self._began})
            self._phase = None
