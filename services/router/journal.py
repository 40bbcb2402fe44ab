"""What is remembered of a request for its completion, its line in the log and its trace. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from common.errors import ServingError
from common.telemetry.tracing import Tracing, under
from services.router.attempt import Attempt, AttemptFailed
from services.router.commits import Commits, Committed, Round
from services.router.contexts import LiveRequest
from services.router.events import Admitted, Event, FirstToken
from services.router.requests import Chunk, Completion, GenerationRequest, Route, Timings, Usage
from services.router.story import Story, log_story, trace_story
from services.router.trace_stages import Stage, TraceStages

logger = logging.getLogger(__name__)


class Journal:
    """Marks of one request on a monotonic clock; of repeated placements the first marks and the last route."""

    def __init__(
        self,
        request: GenerationRequest,
        clock: Callable[[], float],
        *,
        model: str,
        tracing: Tracing,
    ) -> None:
        """The request came in now."""
        self._request = request
        self._model = model
        self._clock = clock
        self._arrival = clock()
        self.stages = TraceStages(clock, began=self._arrival)
        self._span = tracing.begin(
            f"{request.operation} {model}",
            traceparent=request.traceparent,
            began=self._arrival,
        )
        self._placed: float | None = None
        self._first_token: float | None = None
        self._admitted: float | None = None
        self._num_from_leases = 0
        self._route = Route()
        self._live: LiveRequest | None = None

    @property
    def stage(self) -> str:
        """Where the request is, for the message of a passed deadline."""
        if self._placed is None:
            return "queue"
        return "prefill" if self._first_token is None else "decode"

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """The block is the request's whole life, part of its trace; at its end stand one line in the log and a span."""
        finish_reason, error, cause = "", "INTERNAL", ""
        with under(self._span):
            try:
                yield
                finish_reason, error = self._finish_reason(), ""
            except ServingError as failure:
                error, cause = failure.reason, failure.message
                raise
            except asyncio.CancelledError:
                error = "CANCELLED"
                raise
            finally:
                self.stages.end()
                story = self._story(finish_reason, error, cause)
                log_story(story)
                if self._span is not None:
                    trace_story(self._span, story, self.stages)

    def began(self, live: LiveRequest) -> None:
        """The request is valid and known to the router."""
        self._live = live
        self.stages.enter(Stage.QUEUE)

    def placed(self, attempt: Attempt, live: LiveRequest) -> None:
        self._placed = self._placed or self._clock()
        self.stages.placed(is_from_lease=attempt.is_from_lease)
        self._num_from_leases += attempt.is_from_lease
        self._route = Route(
            prefill_worker=attempt.prefill.address if attempt.prefill is not None else "",
            decode_worker=attempt.decode.address,
            replacements=live.num_replacements,
        )

    def saw(self, event: Event) -> None:
        self.stages.saw(event, has_handoff=bool(self._route.prefill_worker))
        match event:
            case FirstToken() | Round():
                self._first_token = self._first_token or self._clock()
            case Admitted(first_token_id=first_token_id):
                self._admitted = self._admitted or self._clock()
                if first_token_id is not None:
                    self._first_token = self._first_token or self._admitted
                self._route = replace(
                    self._route,
                    drafter_fallback=event.drafter_fallback,
                    transfer_engine=event.transfer_engine,
                )

    def failed(self, failure: AttemptFailed, live: LiveRequest) -> None:
        self.stages.enter(Stage.QUEUE)
        logger.warning(
            "request failed on %s after %d tokens: %s",
            failure.worker,
            len(live.context.committed),
            failure.error.message,
            extra={"request_id": live.request_id, "epoch": live.context.epoch},
        )

    def chunk(self, committed: Committed, commits: Commits) -> Chunk:
        """What the client gets of a commit; the last one tells the whole story."""
        completion = None
        if committed.finish is not None:
            self.stages.enter(Stage.FINISH)
            completion = Completion(
                finish=committed.finish,
                usage=_usage(commits),
                timings=self._timings(),
                route=self._route,
            )
        return Chunk(
            request_id=commits.context.request_id,
            token_ids=committed.token_ids,
            text=committed.text,
            logprobs=committed.logprobs,
            completion=completion,
        )

    def _timings(self) -> Timings:
        now = self._clock()
        has_handoff = bool(self._route.prefill_worker)
        return Timings(
            queue_s=(self._placed or now) - self._arrival,
            prefill_s=_between(self._placed, self._first_token),
            handoff_s=_between(self._first_token, self._admitted) if has_handoff else 0.0,
            time_to_first_token_s=_between(self._arrival, self._first_token),
            total_s=now - self._arrival,
        )

    def _finish_reason(self) -> str:
        finish = self._live.commits.finish if self._live is not None else None
        assert finish is not None, f"{self._request.request_id} ended with neither reason nor error"
        return finish.reason.value

    def _story(self, finish_reason: str, error: str, cause: str) -> Story:
        commits = self._live.commits if self._live is not None else None
        return Story(
            request=self._request,
            model=self._model,
            finish_reason=finish_reason,
            error=error,
            cause=cause,
            usage=_usage(commits) if commits is not None else None,
            timings=self._timings(),
            route=self._route,
            num_from_leases=self._num_from_leases,
        )


def _usage(commits: Commits) -> Usage:
    return Usage(
        prompt_tokens=len(commits.context.prompt),
        completion_tokens=len(commits.context.committed),
        rounds=commits.counts.rounds,
        draft_tokens=commits.counts.draft_tokens,
        accepted_tokens=commits.counts.accepted_tokens,
    )


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else max(0.0, end - start)
