"""The parts of one router, put together once. Knows what there is; the path of a request is in `pipeline`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.rpc.tracing import client_interceptors
from common.rpc.worker_info import server_version
from common.telemetry.metrics import RouterMetrics
from common.telemetry.tracing import OFF, Tracing
from common.tokenizer import Tokenizer
from services.router.admission import AdmissionQueue
from services.router.config import RouterConfig
from services.router.contexts import Contexts
from services.router.leases import Leases
from services.router.meter import Meters
from services.router.pipeline import Pipeline
from services.router.role_load import RoleLoad
from services.router.validation import Validator
from services.router.workers import WorkerDirectory


class Router:
    """Must be built inside the event loop that runs it; `on_change` hears when readiness may have changed."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        metrics: RouterMetrics,
        on_change: Callable[[], None],
        tracing: Tracing = OFF,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.tokenizer = Tokenizer.from_folder(config.checkpoint_dir)
        self._clock = asyncio.get_running_loop().time
        self._start = self._clock()
        self._on_change = on_change
        self.queue = AdmissionQueue(config.queue, self._clock)
        self.contexts = Contexts()
        self.leases = Leases()
        self.validator = Validator(config.model, self.tokenizer)
        self.workers = WorkerDirectory(
            config,
            metrics=metrics.routing,
            on_change=self._workers_changed,
            interceptors=client_interceptors(tracing),
        )
        self.meters = Meters(metrics, self._clock)
        self.pipeline = Pipeline(
            config,
            tokenizer=self.tokenizer,
            validator=self.validator,
            workers=self.workers,
            queue=self.queue,
            contexts=self.contexts,
            leases=self.leases,
            meters=self.meters,
            tracing=tracing,
        )
        self._measure(metrics)

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._start

    @property
    def num_placed(self) -> int:
        """Requests that are past the queue."""
        return max(0, len(self.contexts) - self.queue.num_waiting)

    def why_not_ready(self) -> str | None:
        """Why no requests should come here; None when they may."""
        return "draining" if self.contexts.is_draining else self.workers.why_not_ready()

    def details(self) -> dict[str, str]:
        """Settings by name, for people. Nothing here is secret."""
        return {
            "model": self.config.model,
            **self._settings(),
            **self.workers.transfer_details(),
        }

    def _settings(self) -> dict[str, str]:
        config = self.config
        return {
            "max_queued": str(config.queue.max_queued),
            "queue_timeout_s": str(config.queue.queue_timeout_s),
            "request_timeout_s": str(config.request_timeout_s),
            "max_attempts": str(config.workers.max_attempts),
            "max_message_bytes": str(config.max_message_bytes),
        }

    def _measure(self, metrics: RouterMetrics) -> None:
        """Say what does not change; what waits and runs is looked up whenever metrics are asked for."""
        metrics.process.describe_build(server_version())
        metrics.process.describe_config(self._settings())
        metrics.requests.in_flight.set_function(lambda: len(self.contexts))
        metrics.routing.queue_requests.set_function(lambda: self.queue.num_waiting)
        metrics.routing.expected_wait.set_function(self.queue.expected_wait_s)
        for role, workers in (("prefill", self.workers.prefill), ("decode", self.workers.decode)):
            RoleLoad(role, workers, self.meters).measure(metrics.roles, metrics.routing)

    def _workers_changed(self) -> None:
        self.queue.notify_room()
        self._on_change()
