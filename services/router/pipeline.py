"""The path of one request, from what the client asks to its last token. Start reading the router here.

Knows the order of things; what is valid, where there is room and which tokens count is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from common.errors import (
    CapacityExhausted,
    DeadlinePassed,
    LeaseEnded,
    ServingError,
    StreamInterrupted,
    WorkerLost,
)
from common.telemetry.tracing import Tracing
from common.tokenizer import Tokenizer
from services.router.admission import AdmissionQueue
from services.router.attempt import Attempt, AttemptEvent, AttemptFailed
from services.router.commits import Commits, Committed, Round
from services.router.config import RouterConfig
from services.router.contexts import Contexts, LiveRequest
from services.router.events import Admitted, FirstToken, HandedOff
from services.router.journal import Journal
from services.router.leases import Lease, Leases
from services.router.meter import Meters, RequestMeter
from services.router.outlet import Outlet
from services.router.placement import Placer
from services.router.requests import Chunk, GenerationRequest
from services.router.text import TextStream
from services.router.validation import Validator
from services.router.workers import WorkerDirectory


class Pipeline:
    """Runs requests. All of it lives on one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        tokenizer: Tokenizer,
        validator: Validator,
        workers: WorkerDirectory,
        queue: AdmissionQueue,
        contexts: Contexts,
        leases: Leases,
        meters: Meters,
        tracing: Tracing,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._validator = validator
        self._workers = workers
        self._queue = queue
        self._contexts = contexts
        self._leases = leases
        self._meters = meters
        self._tracing = tracing
        self._clock = asyncio.get_running_loop().time
        self._placer = Placer(config, workers, queue, leases, self._clock)

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float | None
    ) -> AsyncGenerator[Chunk, None]:
        """Committed chunks as they come, the last one with the completion.

        Closing the iterator early ends the request on all workers before `aclose` returns; a consumer that is slow
        pauses only its own request. `timeout_s` is what the client's deadline leaves, None for no deadline.
        Raises the ServingError that ended the request.
        """
        limit_s = self._config.request_timeout_s
        deadline = self._clock() + (limit_s if timeout_s is None else min(timeout_s, limit_s))
        outlet = Outlet()
        task = asyncio.create_task(self._run(request, deadline, outlet))
        task.add_done_callback(lambda _: outlet.close())
        try:
            async for chunk in outlet:
                yield chunk
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self, request: GenerationRequest, deadline: float, outlet: Outlet) -> None:
        """Validate, register, complete; and say how it ended, whichever way that is."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine always runs in a task"
        meter = self._meters.begin()
        journal = Journal(request, self._clock, model=self._config.model, tracing=self._tracing)
        with journal.kept():
            self._contexts.check_open()
            context = await self._validator.context(request, self._workers.model())
            text = TextStream(self._tokenizer.detokenizer(), context.stop.stop)
            commits = Commits(context, text, eos_token_ids=self._tokenizer.eos_token_ids)
            with (
                self._contexts.registered(commits, task, journal.stages) as live,
                meter.of(commits),
            ):
                journal.began(live)
                try:
                    await self._complete_in_time(live, journal, meter, outlet, deadline)
                except asyncio.CancelledError:
                    if not live.is_abort_requested:
                        raise
                    task.uncancel()
                    outlet.put(journal.chunk(commits.abort(), commits))
                finally:
                    self._queue.notify_room()
                    self._take_lease(live, None)

    async def _complete_in_time(
        self,
        live: LiveRequest,
        journal: Journal,
        meter: RequestMeter,
        outlet: Outlet,
        deadline: float,
    ) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._complete(live, journal, meter, outlet, deadline)
        except TimeoutError:
            if live.commits.finish is not None:
                return  # the deadline came while the workers were being left
            raise DeadlinePassed(
                f"the deadline passed during {journal.stage}", metadata={"stage": journal.stage}
            ) from None
        except DeadlinePassed:
            raise
        except ServingError as error:
            num_shown = len(live.context.committed)
            if num_shown == 0:
                raise
            raise StreamInterrupted(
                f"after {num_shown} tokens: {error.message}",
                metadata={
                    **error.metadata,
                    "tokens_emitted": str(num_shown),
                    "cause": error.reason,
                },
            ) from error

    async def _complete(
        self,
        live: LiveRequest,
        journal: Journal,
        meter: RequestMeter,
        outlet: Outlet,
        deadline: float,
    ) -> None:
        """Place the context and follow it; when a worker fails, place it again with all that is committed."""
        while True:
            try:
                async with self._placer.placed(live, deadline) as attempt:
                    journal.placed(attempt, live)
                    meter.placed(attempt)
                    live.commits.begin()
                    await self._follow(attempt, live, journal, meter, outlet)
                    return
            except AttemptFailed as failure:
                journal.failed(failure, live)
                meter.failed(failure)
                self._note_failure(failure, live)
                live.commits.next_epoch()
                if isinstance(failure.error, CapacityExhausted):
                    await self._queue.room()

    def _note_failure(self, failure: AttemptFailed, live: LiveRequest) -> None:
        """Returning means that the request is placed again. Raises the error when it is not."""
        lease = live.lease
        if lease is not None and failure.worker == lease.worker.address:
            # Whatever went wrong there, the next placement computes the state anew.
            self._take_lease(live, None)
        if isinstance(failure.error, LeaseEnded):
            return  # no worker is to blame
        if failure.between is not None:
            self._workers.doubt(*failure.between)
        live.failures.note(
            failure.error,
            failure.suspects,
            now=self._clock(),
            max_attempts=self._config.workers.max_attempts,
            patience_s=self._config.queue.queue_timeout_s,
        )

    def _note_lease(self, event: HandedOff, attempt: Attempt, live: LiveRequest) -> None:
        known = live.lease
        if attempt.prefill is None or (known is not None and known.lease_id == event.lease_id):
            return
        self._take_lease(live, self._leases.hold(attempt.prefill, event.lease_id, event.lease_s))

    def _take_lease(self, live: LiveRequest, lease: Lease | None) -> None:
        """Keep this lease for the request instead of the one before."""
        if live.lease is not None and live.lease is not lease:
            self._leases.release(live.lease)
        live.lease = lease

    async def _follow(
        self,
        attempt: Attempt,
        live: LiveRequest,
        journal: Journal,
        meter: RequestMeter,
        outlet: Outlet,
    ) -> None:
        """Commit what the workers report, tell decode, show the client; a client that is slow pauses all three."""
        commits = live.commits
        while True:
            event = await attempt.next_event()
            journal.saw(event)
            meter.saw(event)
            if isinstance(event, HandedOff):
                self._note_lease(event, attempt, live)
            committed = _commit(event, commits, attempt)
            if committed is None:
                continue
            attempt.confirm(committed)
            meter.committed(committed)
            outlet.put(journal.chunk(committed, commits))
            if committed.finish is not None:
                return
            with meter.client():
                await outlet.taken()


def _commit(event: AttemptEvent, commits: Commits, attempt: Attempt) -> Committed | None:
    """What an event adds to the context; None when nothing. Tokens that do not fit are decode's failure."""
    try:
        match event:
            case FirstToken(token_id=token_id, logprob=logprob):
                return commits.commit_first_token(attempt.epoch, token_id, logprob)
            case Admitted(first_token_id=int(token_id), first_logprob=logprob):
                return commits.commit_first_token(attempt.epoch, token_id, logprob)
            case Round():
                return commits.commit_round(event)
            case Admitted() | HandedOff():
                return None
    except WorkerLost as error:
        raise AttemptFailed(error, attempt.decode.address) from error
