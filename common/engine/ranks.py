"""Who runs the steps that an engine schedules: one process, or a mesh of them. Knows no scheduling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.engine.clock import PhaseClock
from common.engine.outputs import RequestOutput
from common.engine.request import Request, StepListener
from common.engine.runner import Runner, StepRows
from common.engine.scheduler import ScheduledRequest
from common.kv_cache.pool import CachePool
from common.types import RequestId

GroupSteps = Sequence[Sequence[ScheduledRequest]]
"""A step's part for each data parallel group."""


class Ranks(Protocol):
    """What an engine runs its steps on. Called on the engine thread only."""

    @property
    def num_groups(self) -> int:
        """Data parallel groups; each has requests and cache of its own."""
        ...

    @property
    def pool(self) -> CachePool:
        """The cache of all groups as this process sees it, where hand-offs read and write."""
        ...

    def add(self, request: Request) -> None:
        """The request may be in steps from now on."""
        ...

    def remove(self, request_id: RequestId) -> None:
        """The request will be in no step any more."""
        ...

    def run(
        self, steps: GroupSteps, clock: PhaseClock, listener: StepListener | None
    ) -> list[list[RequestOutput | None]]:
        """One output per scheduled request and group; None for those that only computed a chunk.

        `listener` is told of rows that are in `pool` before the step's tokens are sampled, and of tokens before the next
        proposals are drafted; of neither where ranks are several.
        """
        ...

    def keep_alive(self) -> None:
        """Nothing has run for a while, and nothing may for long."""
        ...

    def close(self) -> None:
        """No more steps."""
        ...


class OneRank:
    """A mesh of one: the runner's own process."""

    num_groups = 1

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def pool(self) -> CachePool:
        return self._runner.pool

    def add(self, request: Request) -> None:
        self._runner.adopt(request)

    def remove(self, request_id: RequestId) -> None:
        pass

    def run(
        self, steps: GroupSteps, clock: PhaseClock, listener: StepListener | None
    ) -> list[list[RequestOutput | None]]:
        rows = StepRows.of(steps, self._runner.draft_length)
        return [self._runner.run(steps[0], rows, clock, listener)]

    def keep_alive(self) -> None:
        pass

    def close(self) -> None:
        pass
