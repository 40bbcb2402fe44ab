"""The commit rule: which of the tokens that workers verified become part of a request, and where it ends.

Knows token ids, rounds and stop conditions; never sees a worker, a queue or a message.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import WorkerLost
from common.types import FinishReason, RequestContext, TokenLogprob
from services.router.text import TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Tokens that a decode worker verified in one step."""

    epoch: int
    number: int
    """Counts up from 1 within an epoch."""
    base: int
    """Length that the tokens extend, prompt included."""
    token_ids: tuple[int, ...]
    """Accepted drafts and the target's own token after them."""
    num_draft: int
    num_accepted: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why a request ended well."""

    reason: FinishReason
    matched_stop: str | None = None
    matched_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What one round added to a request."""

    round: int
    """0 for a first token that a prefill worker sampled."""
    length: int
    """Committed length afterwards, prompt included."""
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish | None


@dataclass(slots=True, kw_only=True)
class RoundCounts:
    """What speculation did for a request."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Without drafts that a stop condition cut."""


class Commits:
    """The only writer of a request's context. Within an epoch tokens come in order, each exactly once."""

    def __init__(
        self, context: RequestContext, text: TextStream, *, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.context = context
        self.counts = RoundCounts()
        self.finish: Finish | None = None
        self._text = text
        self._stop_token_ids = frozenset(context.stop.stop_token_ids)
        if not context.stop.ignore_eos:
            self._stop_token_ids |= frozenset(eos_token_ids)
        self._last_round = 0
        self._first_token: int | None = None

    def next_epoch(self) -> None:
        """The context will be placed again: messages of this epoch are void from now on."""
        self.context.epoch += 1

    def begin(self) -> None:
        """The context was placed on workers."""
        self._last_round = 0
        self._first_token = None

    def commit_first_token(
        self, epoch: int, token_id: int, logprob: TokenLogprob | None
    ) -> Committed | None:
        """Commit what the prefill worker sampled; None when it is known already or of an older epoch.

        Both workers report it and the first to do so wins. Raises WorkerLost when they disagree.
        """
        if epoch != self.context.epoch or self.finish is not None:
            return None
        if self._first_token is not None:
            if token_id != self._first_token:
                raise WorkerLost(
                    f"prefill and decode disagree on the first token: {self._first_token}, {token_id}"
                )
            return None
        self._first_token = token_id
        return self._commit(0, (token_id,), () if logprob is None else (logprob,))

    def commit_round(self, round_: Round) -> Committed | None:
        """Commit as much of a round as the request takes; None when it is late, repeated or of an older epoch.

        Raises WorkerLost when the round does not extend what is committed: a message was lost.
        """
        if round_.epoch != self.context.epoch or self.finish is not None:
            return None
        if round_.number <= self._last_round:
            return None
        if round_.base != self.context.length or not round_.token_ids:
            raise WorkerLost(
                f"round {round_.number} brings {len(round_.token_ids)} tokens after {round_.base}, "
                f"but {self.context.length} are committed"
            )
        self._last_round = round_.number
        committed = self._commit(round_.number, round_.token_ids, round_.logprobs)
        self._count(round_, len(committed.token_ids))
        return committed

    def abort(self) -> Committed:
        """End the request where it is."""
        self.finish = Finish(reason=FinishReason.ABORT)
        return self._committed(self._last_round, (), ())

    def _commit(
        self, round_number: int, offered: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> Committed:
        num_taken = 0
        while num_taken < len(offered) and self.finish is None:
            self.finish = self._take_token(offered[num_taken])
            num_taken += 1
        return self._committed(round_number, offered[:num_taken], logprobs[:num_taken])

    def _take_token(self, token_id: int) -> Finish | None:
        """Add one token to the context; says whether it is the last."""
        stop = self.context.stop
        self.context.committed.append(token_id)
        num_generated = len(self.context.committed)
        may_stop = num_generated >= stop.min_tokens
        if may_stop and token_id in self._stop_token_ids:
            # Its text is not part of the result, as with a stop string.
            return Finish(reason=FinishReason.STOP, matched_token_id=token_id)
        matched = self._text.push(token_id, may_stop=may_stop)
        if matched is not None:
            return Finish(reason=FinishReason.STOP, matched_stop=matched)
        if num_generated >= stop.max_tokens:
            return Finish(reason=FinishReason.LENGTH)
        return None

    def _committed(
        self, round_number: int, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> Committed:
        if self.finish is not None and self.finish.matched_stop is None:
            self._text.release()
        return Committed(
            round=round_number,
            length=self.context.length,
            token_ids=token_ids,
            text=self._text.take(),
            logprobs=logprobs,
            finish=self.finish,
        )

    def _count(self, round_: Round, num_taken: int) -> None:
        if round_.number == 1 and self._first_token is None and not round_.num_draft:
            # Decode computed the prompt itself, or what was committed since a lease's state: that ends in a token, as
            # with a prefill worker, and not in a verification.
            return
        self.counts.rounds += 1
        self.counts.draft_tokens += round_.num_draft
        self.counts.accepted_tokens += min(round_.num_accepted, num_taken)
