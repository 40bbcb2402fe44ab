"""One worker as the router sees it. Knows its state and load; never sees a request's tokens."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from common.errors import WorkerLost
from common.telemetry.metrics.router import RoutingMetrics
from dspark.v1 import worker_pb2
from services.router.policy import WorkerLoad, WorkerState

logger = logging.getLogger(__name__)

OnLost = Callable[[WorkerLost], None]


def _ignore(error: WorkerLost) -> None:
    """For whoever finds out by himself."""


class Worker:
    """State and load of one worker. Whoever runs something on it is told when it is lost."""

    def __init__(self, address: str, role: str, metrics: RoutingMetrics) -> None:
        self.address = address
        self.role = role
        self._metrics = metrics
        metrics.know_worker(role=role, worker=address)
        self.state = WorkerState.UNKNOWN
        self.info: worker_pb2.WorkerInfo | None = None
        """The last it said of itself; kept while it is unreachable."""
        self.pending_tokens = 0
        self.running_requests = 0
        self._on_lost: list[OnLost] = []

    @property
    def generation(self) -> str:
        return self.info.generation if self.info is not None else ""

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            address=self.address,
            state=self.state,
            model_fingerprint=self.info.model_fingerprint if self.info is not None else "",
            pending_tokens=self.pending_tokens,
            running_requests=self.running_requests,
        )

    def heard(self, info: worker_pb2.WorkerInfo) -> bool:
        """The worker answered. True when what placement looks at has changed."""
        if self.info is not None and self.generation != info.generation:
            self._lose(f"{self.role} worker {self.address} was restarted")
        before, self.info = (self.state, self.generation), info
        self.state = WorkerState.DRAINING if info.draining else WorkerState.READY
        if before[0] is not self.state:
            logger.info("%s worker %s is %s", self.role, self.address, self.state.value)
        return before != (self.state, self.generation)

    def missed(self, why: str) -> bool:
        """The worker is gone or does not answer. True when it was thought to be there."""
        was_there = self.state in (WorkerState.READY, WorkerState.DRAINING)
        self.state = WorkerState.UNREACHABLE
        if was_there:
            self._lose(f"{self.role} worker {self.address} is unreachable: {why}")
        return was_there

    @contextlib.contextmanager
    def carrying(self, num_tokens: int, on_lost: OnLost = _ignore) -> Iterator[None]:
        """Count a request as running here until the block ends; `on_lost` is called if the worker goes before."""
        self.pending_tokens += num_tokens
        self.running_requests += 1
        self._on_lost.append(on_lost)
        try:
            yield
        finally:
            self.pending_tokens -= num_tokens
            self.running_requests -= 1
            self._on_lost.remove(on_lost)

    def forget(self) -> None:
        """The worker is dropped; nothing is told of it any more."""
        self._metrics.forget_worker(role=self.role, worker=self.address)

    def _lose(self, why: str) -> None:
        self._metrics.ejections.labels(role=self.role, worker=self.address).inc()
        logger.warning("%s; %d requests are placed again", why, self.running_requests)
        for on_lost in tuple(self._on_lost):
            on_lost(WorkerLost(why, metadata={"worker": self.address}))
