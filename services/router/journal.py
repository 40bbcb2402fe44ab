"""What is remembered of a request for its completion and for its line in the log. Decides nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from common.errors import ServingError
from services.router.attempt import Attempt, AttemptFailed
from services.router.commits import Commits, Committed, Round
from services.router.contexts import LiveRequest
from services.router.events import Admitted, Event, FirstToken
from services.router.requests import Chunk, Completion, Route, Timings, Usage

logger = logging.getLogger(__name__)


class Journal:
    """Marks of one request on a monotonic clock; of repeated placements the first marks and the last route."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrival = clock()
        self._placed: float | None = None
        self._first_token: float | None = None
        self._admitted: float | None = None
        self._num_from_leases = 0
        self._route = Route()

    @property
    def stage(self) -> str:
        """Where the request is, for the message of a passed deadline."""
        if self._placed is None:
            return "queue"
        return "prefill" if self._first_token is None else "decode"

    @contextlib.contextmanager
    def of(self, live: LiveRequest) -> Iterator[None]:
        """Writes the request's one line at its end."""
        outcome = "cancelled"
        try:
            yield
            finish = live.commits.finish
            assert finish is not None, f"{live.request_id} ended with neither reason nor error"
            outcome = finish.reason.value
        except ServingError as error:
            outcome = f"{error.reason} ({error.message})"
            raise
        finally:
            self._log(live, outcome)

    def placed(self, attempt: Attempt, live: LiveRequest) -> None:
        self._placed = self._placed or self._clock()
        self._num_from_leases += attempt.is_from_lease
        self._route = Route(
            prefill_worker=attempt.prefill.address if attempt.prefill is not None else "",
            decode_worker=attempt.decode.address,
            replacements=live.num_replacements,
        )

    def saw(self, event: Event) -> None:
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
        logger.warning(
            "request %s failed in epoch %d on %s after %d tokens: %s",
            live.request_id,
            live.context.epoch,
            failure.worker,
            len(live.context.committed),
            failure.error.message,
        )

    def chunk(self, committed: Committed, commits: Commits) -> Chunk:
        """What the client gets of a commit; the last one tells the whole story."""
        completion = None
        if committed.finish is not None:
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

    def _log(self, live: LiveRequest, outcome: str) -> None:
        usage, timings = _usage(live.commits), self._timings()
        logger.info(
            "request %s ended: %s; prompt %d, completion %d, rounds %d, drafts %d, accepted %d; "
            "queue %.3f s, first token %.3f s, total %.3f s; prefill %s, decode %s, replacements %d, %d of them from a lease",
            live.request_id,
            outcome,
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.rounds,
            usage.draft_tokens,
            usage.accepted_tokens,
            timings.queue_s,
            timings.time_to_first_token_s,
            timings.total_s,
            self._route.prefill_worker or "-",
            self._route.decode_worker or "-",
            self._route.replacements,
            self._num_from_leases,
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
