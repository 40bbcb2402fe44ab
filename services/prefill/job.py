"""One prefill from arrival to its last event. Knows progress and events; not how either comes about."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from common.errors import RequestAborted, ServingError
from common.types import RequestContext
from services.prefill.events import Event, FirstToken
from services.prefill.loop import ChunkComputed, FirstTokenSampled, Progress, PromptFinished
from services.prefill.sender import DecodeTicket


class Job:
    """Runs in a task of its own, so that the end of a call, however abrupt, leaves its cleaning up undisturbed."""

    def __init__(
        self,
        context: RequestContext,
        ticket: DecodeTicket,
        *,
        arrived_at: float,
        num_to_compute: int,
    ) -> None:
        """`num_to_compute` of the context's tokens are computed here: all, or none when state is handed on."""
        self.context = context
        self.ticket = ticket
        self.num_computed = 0
        self.finished: PromptFinished | None = None
        self.freed = asyncio.Event()
        """Set when the worker has forgotten the job: its room is given back or its lease's."""
        self.is_ending = False
        """Set by the work before it cleans up, which must not be cancelled half way."""
        self.queue_s = 0.0
        """From arrival to the first chunk's start; known with the first token."""
        self.arrived_at = arrived_at
        self._num_to_compute = num_to_compute
        self._has_begun = False
        self._progressed = asyncio.Event()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._task: asyncio.Task[None]
        self._why_cancelled: ServingError | None = None

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are still to be computed."""
        return self._num_to_compute - self.num_computed

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(self._run(work), name=f"prefill {self.context.request_id}")
        self._task.add_done_callback(lambda _: self._events.put_nowait(None))

    def cancel(self, error: ServingError) -> None:
        """Give the job up, once; `events` then ends with `error`."""
        if self._why_cancelled is None and not self.is_ending:
            self._why_cancelled = error
            if self._has_begun:
                self._task.cancel()

    async def events(self) -> AsyncIterator[Event]:
        """What the router is to hear, to the end. Raises what ended the job early."""
        while (event := await self._events.get()) is not None:
            yield event
        if self._task.cancelled():
            raise self._why_cancelled or RequestAborted("the prefill was cancelled")
        self._task.result()

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        # A task that is cancelled before its first step never enters its `try`, and cleans nothing up.
        self._has_begun = True
        if self._why_cancelled is not None:
            self._task.cancel()
        await work

    async def wait_ended(self) -> None:
        await asyncio.wait([self._task])

    def put(self, event: Event) -> None:
        self._events.put_nowait(event)

    def progressed(self, report: Progress) -> None:
        """The engine came further."""
        match report:
            case ChunkComputed():
                self.num_computed = report.num_computed
            case FirstTokenSampled():
                self.num_computed = self._num_to_compute
                self.queue_s = max(0.0, report.first_scheduled_at - self.arrived_at)
                self.put(
                    FirstToken(
                        token_id=report.token_id,
                        logprob=report.logprob,
                        queue_s=self.queue_s,
                        compute_s=report.sampled_at - report.first_scheduled_at,
                    )
                )
            case PromptFinished():
                self.finished = report
        self._progressed.set()

    async def wait_progress(self) -> None:
        """Return once the engine came further since the last call."""
        await self._progressed.wait()
        self._progressed.clear()
