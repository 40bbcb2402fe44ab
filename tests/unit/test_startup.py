"""A start, as probes and metrics tell of it."""

from __future__ import annotations

from common.telemetry.metrics import WorkerMetrics
from common.telemetry.probes import Probes
from common.telemetry.startup import Startup
from tests.support.figures import figure


def test_phases_last_until_the_next_begins_and_weights_are_seen_to_come() -> None:
    now = 0.0
    probes, metrics = Probes(), WorkerMetrics(model="tiny", role="decode")
    startup = Startup(probes, metrics.process, clock=lambda: now)

    def seconds(phase: str) -> float:
        return figure(metrics.registry, "dspark_startup_duration_seconds", phase=phase)

    startup.begin("weights")
    startup.loading(30, 100)
    assert probes.startup() == "starting: weights"
    assert figure(metrics.registry, "dspark_weight_load_progress_ratio") == 0.3
    now = 4.0
    startup.begin("warm-up")
    assert (seconds("weights"), seconds("warm-up")) == (4.0, 0.0)
    now = 4.5
    startup.end()
    startup.end()
    assert (seconds("weights"), seconds("warm-up"), seconds("workers")) == (4.0, 0.5, 0.0)
