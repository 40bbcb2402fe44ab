"""What waits and runs on a decode worker, looked up whenever metrics are asked for. Knows counts; keeps none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.telemetry.metrics import WorkerMetrics
from common.telemetry.metrics.worker import RESERVATION_STATES
from common.types import RequestId
from services.decode.quarantine import Quarantine
from services.decode.reservations import Reservations, ReservationState


def follow_requests(
    metrics: WorkerMetrics,
    *,
    reservations: Reservations,
    quarantine: Quarantine,
    num_uncomputed: Mapping[RequestId, int],
) -> None:
    """From now on the figures are read here, on the thread of whoever asks for metrics.

    `num_uncomputed` has the prompt tokens of requests whose prompt is being computed here.
    """

    def num_in(*states: str) -> Callable[[], float]:
        wanted = tuple(map(ReservationState, states))
        return lambda: reservations.num_in(*wanted)

    engine, transfer = metrics.engine, metrics.transfer
    engine.queue_requests.set_function(num_in("reserved", "receiving", "ready"))
    engine.running_requests.set_function(num_in("running"))
    engine.queue_uncached_tokens.set_function(lambda: sum(tuple(num_uncomputed.values())))
    for state in RESERVATION_STATES:
        engine.reservations.labels(state=state).set_function(num_in(state))
    transfer.handoffs_in_progress.set_function(num_in("receiving"))
    transfer.quarantined_pages.set_function(lambda: quarantine.num_pages)
