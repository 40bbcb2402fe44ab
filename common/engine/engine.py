"""The engine: requests in, verified tokens out, one step at a time. One thread owns it."""

from __future__ import annotations

import time

from common.engine.advance import advance_chunk, advance_round
from common.engine.clock import PhaseClock
from common.engine.config import EngineConfig
from common.engine.ranks import Ranks
from common.engine.request import Request, StepListener, StepReport
from common.engine.scheduler import Scheduler
from common.kv_cache.pool import CachePool
from common.types import RequestId


class Engine:
    """Every method belongs to the engine thread.

    A request is scheduled from `add` to `remove`; its slot and pages stay its adder's, who may free them after `remove`.
    """

    def __init__(self, ranks: Ranks, config: EngineConfig) -> None:
        self.config = config
        self._ranks = ranks
        self._schedulers = [Scheduler(config) for _ in range(ranks.num_groups)]

    @property
    def pool(self) -> CachePool:
        return self._ranks.pool

    @property
    def num_groups(self) -> int:
        """Data parallel groups; pages and slots are theirs in equal, consecutive parts."""
        return len(self._schedulers)

    @property
    def num_requests(self) -> int:
        return sum(len(scheduler) for scheduler in self._schedulers)

    @property
    def has_work(self) -> bool:
        """True when a step would move some request."""
        return any(scheduler.has_work for scheduler in self._schedulers)

    def add(self, request: Request) -> None:
        """Schedule a request from its `num_computed` on: a prompt, or state that was handed over."""
        self._schedulers[request.group].add(request)
        self._ranks.add(request)

    def remove(self, request_id: RequestId) -> Request | None:
        """Stop scheduling a request and give it back; None when it is not here."""
        for scheduler in self._schedulers:
            request = scheduler.remove(request_id)
            if request is not None:
                self._ranks.remove(request_id)
                return request
        return None

    def commit(self, request_id: RequestId, round_number: int) -> None:
        """The router has taken rounds up to `round_number`; unknown requests and older rounds are ignored."""
        for scheduler in self._schedulers:
            request = scheduler.get(request_id)
            if request is not None:
                request.acknowledged_round = max(request.acknowledged_round, round_number)

    def step(self, listener: StepListener | None = None) -> StepReport:
        """Schedule, run, and move every scheduled request forward.

        One rank tells `listener` of rows before tokens are sampled, and of tokens before more are drafted: that much sooner
        they can be handed over.
        """
        clock = PhaseClock()
        begin = time.monotonic()
        with clock.phase("schedule"):
            steps = [scheduler.schedule() for scheduler in self._schedulers]
            for scheduled in (each for step in steps for each in step):
                timings = scheduled.request.timings
                timings.first_scheduled = timings.first_scheduled or begin
            num_prompt_tokens = sum(
                each.num_tokens for step in steps for each in step if each.request.computes_prompt
            )
        outputs = self._ranks.run(steps, clock, listener)
        with clock.phase("commit"):
            rounds, progressed = [], []
            for step, outcome in zip(steps, outputs, strict=True):
                for scheduled, output in zip(step, outcome, strict=True):
                    if output is None:
                        progressed.append(advance_chunk(scheduled))
                    else:
                        rounds.append(advance_round(scheduled, output))
        return StepReport(
            rounds=tuple(rounds),
            progressed=tuple(progressed),
            num_prompt_tokens=num_prompt_tokens,
            num_rows=sum(scheduled.num_rows for step in steps for scheduled in step),
            seconds=time.monotonic() - begin,
            phase_seconds=clock.seconds,
        )

    def keep_alive(self) -> None:
        """Called now and then while there is no work."""
        self._ranks.keep_alive()

    def close(self) -> None:
        """Let all ranks go; the engine is of no use afterwards."""
        self._ranks.close()
