"""The path of one request, from what the client asks to its last token. Start reading the router here.

Knows the order of things; what is valid, where there is room and which tokens count is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from common.errors import (
    CapacityExhausted,
    DeadlinePassed,
    ServingError,
    StreamInterrupted,
    WorkerLost,
)
from common.tokenizer import Tokenizer
from services.router.admission import AdmissionQueue
from services.router.attempt import Attempt, AttemptEvent, AttemptFailed
from services.router.commits import Commits, Committed, Round
from services.router.config import RouterConfig
from services.router.contexts import Contexts, LiveRequest
from services.router.events import Admitted, FirstToken, HandedOff
from services.router.journal import Journal
from services.router.leases import Leases
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
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._validator = validator
        self._workers = workers
        self._queue = queue
        self._contexts = contexts
        self._leases = leases
        self._clock = asyncio.get_running_loop().time
        self._placer = Placer(config, workers, queue, self._clock)

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
        self._contexts.check_open()
        journal = Journal(self._clock)
        context = await self._validator.context(request, self._workers.model())
        text = TextStream(self._tokenizer.detokenizer(), context.stop.stop)
        commits = Commits(context, text, eos_token_ids=self._tokenizer.eos_token_ids)
        with self._contexts.registered(commits, task) as live, journal.of(live):
            try:
                await self._complete_in_time(live, journal, outlet, deadline)
            except asyncio.CancelledError:
                if not live.is_abort_requested:
                    raise
                task.uncancel()
                outlet.put(journal.chunk(commits.abort(), commits))
            finally:
                self._queue.notify_room()
                for worker, lease_id in journal.leases:
                    self._leases.release(worker, lease_id)

    async def _complete_in_time(
        self, live: LiveRequest, journal: Journal, outlet: Outlet, deadline: float
    ) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._complete(live, journal, outlet, deadline)
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
        self, live: LiveRequest, journal: Journal, outlet: Outlet, deadline: float
    ) -> None:
        """Place the context and follow it; when a worker fails, place it again with all that is committed."""
        while True:
            try:
                async with self._placer.placed(live, deadline) as attempt:
                    journal.placed(attempt, live)
                    live.commits.begin(computes_prompt=attempt.prefill is None)
                    await self._follow(attempt, live.commits, journal, outlet)
                    return
            except AttemptFailed as failure:
                journal.failed(failure, live)
                live.failures.note(
                    failure.error,
                    failure.worker,
                    now=self._clock(),
                    max_attempts=self._config.workers.max_attempts,
                    patience_s=self._config.queue.queue_timeout_s,
                )
                live.commits.next_epoch()
                if isinstance(failure.error, CapacityExhausted):
                    await self._queue.room()

    async def _follow(
        self, attempt: Attempt, commits: Commits, journal: Journal, outlet: Outlet
    ) -> None:
        """Commit what the workers report, tell decode, show the client; a client that is slow pauses all three."""
        while True:
            event = await attempt.next_event()
            journal.saw(event, attempt)
            committed = _commit(event, commits, attempt)
            if committed is None:
                continue
            attempt.confirm(committed)
            outlet.put(journal.chunk(committed, commits))
            if committed.finish is not None:
                return
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
