"""The engine: requests in, verified tokens out, one step at a time. One thread owns it."""

from __future__ import annotations

import time

from common.engine.clock import PhaseClock
from common.engine.config import EngineConfig
from common.engine.outputs import RequestOutput
from common.engine.request import Request, RoundResult, StepReport
from common.engine.runner import Runner
from common.engine.scheduler import ScheduledRequest, Scheduler
from common.kv_cache.pool import CachePool
from common.types import RequestId


class Engine:
    """Every method belongs to the engine thread.

    A request is scheduled from `add` to `remove`; its slot and pages stay its adder's, who may free them after `remove`.
    """

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        self.config = config
        self._runner = runner
        self._scheduler = Scheduler(config)

    @property
    def pool(self) -> CachePool:
        return self._runner.pool

    @property
    def num_requests(self) -> int:
        return len(self._scheduler)

    @property
    def has_work(self) -> bool:
        """True when a step would move some request."""
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Schedule a request from its `num_computed` on: a prompt, or state that was handed over."""
        request.timings.added = time.monotonic()
        self._scheduler.add(request)

    def remove(self, request_id: RequestId) -> Request | None:
        """Stop scheduling a request and give it back; None when it is not here."""
        return self._scheduler.remove(request_id)

    def commit(self, request_id: RequestId, round_number: int) -> None:
        """The router has taken rounds up to `round_number`; unknown requests and older rounds are ignored."""
        request = self._scheduler.get(request_id)
        if request is not None:
            request.acknowledged_round = max(request.acknowledged_round, round_number)

    def step(self) -> StepReport:
        """Schedule, run, and move every scheduled request forward."""
        clock = PhaseClock()
        begin = time.monotonic()
        with clock.phase("schedule"):
            step = self._scheduler.schedule()
            for scheduled in step:
                timings = scheduled.request.timings
                timings.first_scheduled = timings.first_scheduled or begin
        outputs = self._runner.run(step, clock)
        with clock.phase("commit"):
            rounds = [
                _advance(scheduled, output)
                for scheduled, output in zip(step, outputs, strict=True)
                if output is not None
            ]
            progressed = [
                _advance_chunk(scheduled)
                for scheduled, output in zip(step, outputs, strict=True)
                if output is None
            ]
        return StepReport(
            rounds=tuple(rounds),
            progressed=tuple(progressed),
            num_rows=sum(scheduled.num_rows for scheduled in step),
            seconds=time.monotonic() - begin,
            phase_seconds=clock.seconds,
        )


def _advance_chunk(scheduled: ScheduledRequest) -> Request:
    scheduled.request.num_computed += scheduled.num_tokens
    return scheduled.request


def _advance(scheduled: ScheduledRequest, output: RequestOutput) -> RoundResult:
    """Rejected drafts are dropped by not counting them: position is the only address, so nothing is undone."""
    request = scheduled.request
    base = len(request.tokens)
    looked_at = request.draft.proposal.confidences[: scheduled.num_draft] if request.draft else ()
    request.num_computed += scheduled.num_tokens + output.num_accepted
    request.tokens += output.token_ids
    request.draft = output.draft
    request.round += 1
    request.timings.first_token = request.timings.first_token or time.monotonic()
    assert request.num_computed == len(request.tokens) - 1, (
        f"{request.num_computed=} {len(request.tokens)=}"
    )
    assert request.room >= 0, (
        f"{request.request_id} grew to {len(request.tokens)} of {request.max_length}"
    )
    return RoundResult(
        request=request,
        round=request.round,
        base=base,
        token_ids=output.token_ids,
        num_draft=scheduled.num_draft,
        num_accepted=output.num_accepted,
        confidences=looked_at,
        logprobs=output.logprobs,
    )
