"""The jobs of a prefill worker, one of a request at a time. Knows requests and epochs; not what a job does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from common.errors import RequestAborted, WorkerLost
from common.transfer.handoff import HandoffKey
from common.types import RequestContext, RequestId
from services.prefill.job import Job
from services.prefill.requests import require_newer

END_TIMEOUT_S = 5.0
"""For a job that was told to end: a step of the engine, and a write's stop."""


class Jobs:
    """From a job's `add` to its `forget`, when its memory is not its own any more."""

    def __init__(self, on_left: Callable[[], None]) -> None:
        """`on_left` hears of every job that is forgotten."""
        self._on_left = on_left
        self._by_request: dict[RequestId, Job] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Job]:
        """Those of now, whatever comes and goes meanwhile; other threads may ask."""
        return iter(tuple(self._by_request.values()))

    def of_epoch(self, request_id: RequestId, epoch: int) -> Job | None:
        """The request's job if it is of this epoch."""
        job = self._by_request.get(request_id)
        return job if job is not None and job.context.epoch == epoch else None

    def of_handoff(self, key: HandoffKey) -> Job | None:
        """The job that hands this over."""
        job = self.of_epoch(key.request_id, key.epoch)
        is_it = job is not None and job.ticket.reservation_id == key.reservation_id
        return job if is_it else None

    async def make_way(self, context: RequestContext) -> None:
        """End the request's older epochs. Raises DuplicateRequest or RequestNotFound when it is here in this or a newer one,
        and WorkerLost when an older one does not end."""
        while (known := self._by_request.get(context.request_id)) is not None:
            require_newer(context, known_epoch=known.context.epoch)
            known.cancel(RequestAborted("the request was placed again"))
            try:
                async with asyncio.timeout(END_TIMEOUT_S):
                    await known.freed.wait()
            except TimeoutError:
                raise WorkerLost(
                    f"epoch {known.context.epoch} of request {context.request_id!r} does not end"
                ) from None

    def add(self, job: Job) -> None:
        """`make_way` has returned, and nobody else has run since."""
        assert job.context.request_id not in self._by_request
        self._by_request[job.context.request_id] = job

    def forget(self, job: Job) -> None:
        """May come twice."""
        if self._by_request.get(job.context.request_id) is job:
            del self._by_request[job.context.request_id]
        job.freed.set()
        self._on_left()
