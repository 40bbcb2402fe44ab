"""The parts of one router, put together once. Knows what there is; the path of a request is in `pipeline`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.tokenizer import Tokenizer
from services.router.admission import AdmissionQueue
from services.router.config import RouterConfig
from services.router.contexts import Contexts
from services.router.leases import Leases
from services.router.pipeline import Pipeline
from services.router.validation import Validator
from services.router.workers import WorkerDirectory


class Router:
    """Must be built inside the event loop that runs it; `on_change` hears when readiness may have changed."""

    def __init__(self, config: RouterConfig, *, on_change: Callable[[], None]) -> None:
        self.config = config
        self.tokenizer = Tokenizer.from_folder(config.checkpoint_dir)
        self._clock = asyncio.get_running_loop().time
        self._start = self._clock()
        self._on_change = on_change
        self.queue = AdmissionQueue(config.queue, self._clock)
        self.contexts = Contexts()
        self.leases = Leases()
        self.validator = Validator(config.model, self.tokenizer)
        self.workers = WorkerDirectory(config, on_change=self._workers_changed)
        self.pipeline = Pipeline(
            config,
            tokenizer=self.tokenizer,
            validator=self.validator,
            workers=self.workers,
            queue=self.queue,
            contexts=self.contexts,
            leases=self.leases,
        )

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._start

    @property
    def num_placed(self) -> int:
        """Requests that are past the queue."""
        return max(0, len(self.contexts) - self.queue.num_waiting)

    def details(self) -> dict[str, str]:
        """Settings by name, for people. Nothing here is secret."""
        config = self.config
        return {
            "model": config.model,
            "max_queued": str(config.queue.max_queued),
            "queue_timeout_s": str(config.queue.queue_timeout_s),
            "request_timeout_s": str(config.request_timeout_s),
            "max_attempts": str(config.workers.max_attempts),
            "max_message_bytes": str(config.max_message_bytes),
            **self.workers.transfer_details(),
        }

    def _workers_changed(self) -> None:
        self.queue.notify_room()
        self._on_change()
