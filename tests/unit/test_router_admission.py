"""The queue: order, bound, pace and hopeless deadlines, with a clock of its own."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import DeadlinePassed, QueueFull
from services.router.admission import AdmissionQueue
from services.router.config import QueueConfig


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def queue_of(clock: Clock, *, num_turns: int = 1, max_queued: int = 10) -> AdmissionQueue:
    return AdmissionQueue(QueueConfig(num_turns=num_turns, max_queued=max_queued), clock)


async def hold(queue: AdmissionQueue, gate: asyncio.Event, order: list[str], name: str) -> None:
    async with queue.turn(deadline=1e9):
        order.append(name)
        await gate.wait()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_turns_are_taken_in_the_order_of_arrival(clock: Clock) -> None:
    queue, order = queue_of(clock), list[str]()
    gates = [asyncio.Event() for _ in range(3)]
    tasks = [
        asyncio.create_task(hold(queue, gate, order, name))
        for gate, name in zip(gates, "abc", strict=True)
    ]
    await settled()
    assert order == ["a"]
    gates[0].set()
    await settled()
    assert order == ["a", "b"]
    gates[1].set()
    gates[2].set()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]
    assert queue.num_waiting == 0


async def test_one_more_than_may_wait_is_refused(clock: Clock) -> None:
    queue, gate = queue_of(clock, max_queued=1), asyncio.Event()
    task = asyncio.create_task(hold(queue, gate, [], "a"))
    await settled()
    with pytest.raises(QueueFull) as caught:
        async with queue.turn(deadline=1e9):
            pass
    assert caught.value.retry_after_s is not None and caught.value.retry_after_s > 0
    gate.set()
    await task
    async with queue.turn(deadline=1e9):
        pass


async def test_a_waiter_that_is_cancelled_leaves_no_trace(clock: Clock) -> None:
    queue, gate = queue_of(clock), asyncio.Event()
    first = asyncio.create_task(hold(queue, gate, [], "a"))
    second = asyncio.create_task(hold(queue, gate, [], "b"))
    await settled()
    second.cancel()
    gate.set()
    await asyncio.wait((first, second))
    assert queue.num_waiting == 0


async def test_a_deadline_before_the_expected_turn_is_refused_early(clock: Clock) -> None:
    queue, order = queue_of(clock), list[str]()
    gates = [asyncio.Event() for _ in range(8)]
    tasks = [asyncio.create_task(hold(queue, gate, order, "x")) for gate in gates]
    await settled()
    for gate in gates[:4]:
        clock.now += 2.0
        gate.set()
        await settled()
    assert queue.expected_wait_s() > 1.0
    with pytest.raises(DeadlinePassed, match="expected"):
        async with queue.turn(deadline=clock.now + 0.5):
            pass
    for gate in gates:
        gate.set()
    await asyncio.gather(*tasks)


async def test_as_long_as_nothing_is_known_no_deadline_is_hopeless(clock: Clock) -> None:
    async with queue_of(clock).turn(deadline=clock.now + 0.001):
        pass


async def test_room_wakes_all_that_wait_for_it(clock: Clock) -> None:
    queue = queue_of(clock)
    waiting = [asyncio.create_task(queue.room()) for _ in range(3)]
    await settled()
    assert not any(task.done() for task in waiting)
    queue.notify_room()
    await settled()
    assert all(task.done() for task in waiting)
