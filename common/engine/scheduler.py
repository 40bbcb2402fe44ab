"""Chooses the rows of the next step. Knows requests, counts and confidences; never sees a tensor.

One rule: every request's `num_computed` catches up with its tokens. Requests with one token to go bring that token and
their drafts; requests with more bring a chunk. Those that generate go first, so that a long prompt delays nobody by
more than the rest of a step; a share of the step is kept for prompts, so that generation cannot starve them.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.config import EngineConfig
from common.engine.request import Request, Role
from common.spec_decode.budget import rank_by_survival
from common.types import RequestId

DRAFTER_WARMUP_ROWS = 32
"""Own rows that a drafter window needs before drafting resumes when a hand-off came without drafter state."""

PROMPT_SHARE = 4
"""One part in this many of a step's rows is kept for prompts when any wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """The rows of one request in a step."""

    request: Request
    num_tokens: int
    """Uncomputed tokens that are run."""
    num_draft: int
    """Drafts that are run behind them."""

    @property
    def num_rows(self) -> int:
        return self.num_tokens + self.num_draft

    @property
    def is_sampling(self) -> bool:
        """True when the step reaches the request's newest token, so that the next one is drawn."""
        return self.num_tokens == self.request.num_uncomputed

    @property
    def may_draft(self) -> bool:
        """True when the next proposal is worth drafting behind this step."""
        request = self.request
        own_rows = len(request.tokens) - request.drafter_valid_from
        return (
            self.is_sampling
            and request.room > 2
            and (request.drafter_valid_from == 0 or own_rows >= DRAFTER_WARMUP_ROWS)
        )


class Scheduler:
    """All requests of an engine in order of arrival."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._requests: dict[RequestId, Request] = {}

    def add(self, request: Request) -> None:
        assert request.request_id not in self._requests, (
            f"{request.request_id} is scheduled already"
        )
        self._requests[request.request_id] = request

    def remove(self, request_id: RequestId) -> Request | None:
        return self._requests.pop(request_id, None)

    def get(self, request_id: RequestId) -> Request | None:
        return self._requests.get(request_id)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        return any(self._is_runnable(request) for request in self._requests.values())

    def schedule(self) -> list[ScheduledRequest]:
        """Rows of the next step, at most `max_step_rows`; empty when nothing can run."""
        runnable = [request for request in self._requests.values() if self._is_runnable(request)]
        generating = [request for request in runnable if request.num_uncomputed == 1]
        prompts = [request for request in runnable if request.num_uncomputed > 1]
        rows_left = self._config.max_step_rows
        kept = rows_left // PROMPT_SHARE if prompts else 0
        step = self._schedule_generating(generating, rows_left - kept)
        rows_left -= sum(scheduled.num_rows for scheduled in step)
        for request in prompts:
            if rows_left <= 0:
                break
            num_tokens = min(request.num_uncomputed, rows_left)
            step.append(ScheduledRequest(request=request, num_tokens=num_tokens, num_draft=0))
            rows_left -= num_tokens
        return step

    def _schedule_generating(
        self, requests: list[Request], num_rows: int
    ) -> list[ScheduledRequest]:
        requests = requests[:num_rows]
        widths = [self._num_draft(request) for request in requests]
        budget = num_rows - len(requests)
        if sum(widths) > budget:
            # Full verification does not fit: the drafts most likely to survive go first. The budget is a constant, so
            # it carries no information about the drafts and the cut stays lossless.
            widths = rank_by_survival(
                [
                    self._survival(request, width)
                    for request, width in zip(requests, widths, strict=True)
                ],
                budget,
            )
        return [
            ScheduledRequest(request=request, num_tokens=1, num_draft=width)
            for request, width in zip(requests, widths, strict=True)
        ]

    def _num_draft(self, request: Request) -> int:
        if request.draft is None:
            return 0
        if len(request.tokens) + self._config.draft_length > self._config.max_context_length:
            return (
                0  # a full proposal does not fit the context: target only, for this request alone
            )
        # A proposal that was handed over may be longer than what our rings can roll back.
        num_offered = min(len(request.draft.proposal.token_ids), self._config.draft_length)
        return min(num_offered, request.room - 1)

    @staticmethod
    def _survival(request: Request, width: int) -> list[float]:
        assert request.draft is not None or width == 0
        survival, alive = [], 1.0
        for confidence in request.draft.proposal.confidences[:width] if request.draft else ():
            alive *= confidence
            survival.append(alive)
        return survival

    def _is_runnable(self, request: Request) -> bool:
        if request.num_uncomputed == 0 or request.room <= 0:
            return False
        if request.role is Role.UNTIL_FIRST_TOKEN:
            return request.round == 0
        return request.round - request.acknowledged_round < self._config.max_uncommitted_rounds
