"""What an autoscaler is told of each role's load. Knows requests and workers; looks them up whenever metrics are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.telemetry.metrics.load import RoleMetrics
from common.telemetry.metrics.router import RoutingMetrics
from common.types import RequestContext
from services.router.meter import Meters, RequestMeter
from services.router.policy import WorkerState
from services.router.served_model import POSITIONS_PER_PAGE
from services.router.worker import Worker


class RoleLoad:
    """Load of the workers of one role. Its methods are called by the threads that serve metrics."""

    def __init__(self, role: str, workers: Sequence[Worker], meters: Meters) -> None:
        """`workers` goes on changing."""
        self.role = role
        self._workers = workers
        self._meters = meters
        self._is_prefill = role == "prefill"

    def measure(self, metrics: RoleMetrics, routing: RoutingMetrics) -> None:
        """From now on these figures are looked up here."""
        for gauges, look_up in (
            (metrics.queued_requests, self.queued_requests),
            (metrics.queued_tokens, self.queued_tokens),
            (metrics.running_requests, self.running_requests),
            (metrics.running_tokens, self.running_tokens),
            (metrics.reserved_pages, self.reserved_pages),
            (metrics.capacity_pages, self.capacity_pages),
            (metrics.waiting, self.waiting_s),
        ):
            gauges.labels(role=self.role).set_function(look_up)
        for state in WorkerState:
            gauge = routing.workers.labels(role=self.role, state=state.value)
            gauge.set_function(self._counting(state))

    def queued_requests(self) -> int:
        return len(self._waiting())

    def queued_tokens(self) -> int:
        return sum(self._work(meter.context) for meter in self._waiting())

    def running_requests(self) -> int:
        return sum(worker.running_requests for worker in tuple(self._workers))

    def running_tokens(self) -> int:
        return sum(worker.pending_tokens for worker in tuple(self._workers))

    def reserved_pages(self) -> int:
        """Prefill keeps a request's state, under a lease, until the request ends."""
        placed = [(meter.context, meter.attempt) for meter in self._meters.live()]
        return sum(
            _num_pages(context.length if self._is_prefill else context.max_length)
            for context, attempt in placed
            if attempt is not None and not (self._is_prefill and attempt.prefill is None)
        )

    def capacity_pages(self) -> int:
        return sum(
            worker.info.num_pages
            for worker in tuple(self._workers)
            if worker.info is not None and worker.load().state is WorkerState.READY
        )

    def waiting_s(self) -> float:
        """Of the request that has waited longest; 0 when none does."""
        since = [meter.waits_since for meter in self._waiting()]
        if self._is_prefill and self._workers:
            live = self._meters.live()
            since = [meter.arrived_at for meter in live if not meter.has_first_token]
        return max(0.0, self._meters.clock() - min(since)) if since else 0.0

    def _waiting(self) -> list[RequestMeter]:
        """Requests without a place; without prefill workers none waits for them."""
        if not self._workers:
            return []
        return [meter for meter in self._meters.live() if meter.attempt is None]

    def _work(self, context: RequestContext) -> int:
        return context.length if self._is_prefill else context.max_length - context.length

    def _counting(self, state: WorkerState) -> Callable[[], float]:
        return lambda: sum(worker.load().state is state for worker in tuple(self._workers))


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // POSITIONS_PER_PAGE)
