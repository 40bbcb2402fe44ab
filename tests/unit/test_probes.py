"""Started, ready, alive: what a process says of itself as time passes. The clock is the test's."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import pytest

from common.errors import ConfigError
from common.rpc.worker_process import Patience, why_not_alive, why_not_ready
from common.telemetry.probes import Probes

STALL_S, DEAD_S = 30.0, 120.0
LOOP_STALL_S, LOOP_DEAD_S = 10.0, 60.0
HOUR_S = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Engine:
    """Whose step began when the test says."""

    clock: Clock
    busy_since: float | None = None
    crash: Exception | None = None

    @property
    def busy_s(self) -> float:
        return 0.0 if self.busy_since is None else self.clock() - self.busy_since

    async def wait_crashed(self) -> None:
        raise NotImplementedError


@dataclass
class Worker:
    engine: Engine
    is_draining: bool = False
    is_safe_to_delete: bool = False

    async def tend(self) -> None:
        raise NotImplementedError

    def begin_draining(self) -> None:
        self.is_draining = True

    async def wait_idle(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


@dataclass
class Process:
    """Probes of a worker whose start is over."""

    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.worker = Worker(Engine(self.clock))
        self.probes = Probes(clock=self.clock, loop_stall_s=LOOP_STALL_S, loop_dead_s=LOOP_DEAD_S)
        self.probes.started(
            why_not_ready=functools.partial(why_not_ready, self.worker, STALL_S),
            why_not_alive=functools.partial(why_not_alive, self.worker, DEAD_S),
        )

    def after(self, seconds: float) -> tuple[str | None, str | None]:
        """Readiness and liveness after a while in which the event loop went on turning."""
        self.clock.now += seconds
        self.probes.turn()
        return self.probes.readiness(), self.probes.liveness()


def test_a_slow_load_is_alive_for_hours_but_neither_started_nor_ready() -> None:
    clock = Clock()
    probes = Probes(clock=clock)
    for phase in ("import", "weights", "warm-up"):
        probes.begin(phase)
        clock.now += HOUR_S
        assert probes.startup() == probes.readiness() == f"starting: {phase}"
        assert probes.liveness() is None
    probes.started(why_not_ready=lambda: None)
    assert probes.startup() is probes.readiness() is probes.liveness() is None


def test_an_idle_worker_stays_ready() -> None:
    process = Process()
    assert process.after(HOUR_S) == (None, None)


def test_a_stuck_engine_turns_unready_and_then_dead_and_comes_back_when_it_goes_on() -> None:
    process = Process()
    process.worker.engine.busy_since = process.clock()
    assert process.after(STALL_S) == (None, None)
    assert process.after(1.0) == ("a step has taken 31 s so far", None)
    unready, dead = process.after(DEAD_S - STALL_S)
    assert unready == dead == "a step has taken 121 s so far"
    process.worker.engine.busy_since = None
    assert process.after(0.5) == (None, None)


def test_a_crashed_engine_is_dead_with_its_cause() -> None:
    process = Process()
    process.worker.engine.crash = RuntimeError("a kernel failed")
    cause = "the engine failed: RuntimeError: a kernel failed"
    assert process.after(0.5) == (cause, cause)


def test_draining_is_unready_and_alive() -> None:
    process = Process()
    process.worker.begin_draining()
    assert process.after(HOUR_S) == ("draining, safe_to_delete: false", None)
    process.worker.is_safe_to_delete = True
    assert process.after(0.0) == ("draining, safe_to_delete: true", None)
    assert process.probes.startup() is None


def test_an_event_loop_that_does_not_turn_is_unready_and_then_dead() -> None:
    """Nothing on the loop could report that: the admin port's threads ask the clock."""
    process = Process()
    process.clock.now += LOOP_STALL_S
    assert process.probes.readiness() is None
    process.clock.now += 1.0
    assert process.probes.readiness() == "the event loop has not turned for 11 s"
    assert process.probes.liveness() is None
    process.clock.now += LOOP_DEAD_S
    assert process.probes.liveness() == "the event loop has not turned for 71 s"
    assert process.after(0.0) == (None, None)


def test_a_worker_is_never_dead_before_it_is_unready() -> None:
    with pytest.raises(ConfigError, match=r"dead_s is 30\.0; give more than stall_s \(30\.0\)"):
        Patience(stall_s=30.0, dead_s=30.0, drain_s=0.0)
