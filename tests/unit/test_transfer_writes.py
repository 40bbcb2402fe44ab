"""The bookkeeping of writes: what may be said of one, and when it is forgotten."""

from __future__ import annotations

import asyncio
import gc

import pytest

from common.errors import TransferFailed
from common.transfer.engine import TransferId
from common.transfer.writes import LONGEST_WAIT_S, WAIT_SHARE, Writes, next_wait_s
from tests.support.waiting import WAIT_S


async def test_a_write_is_forgotten_once_it_has_arrived() -> None:
    writes, gate = Writes(), asyncio.Event()

    async def work() -> None:
        await gate.wait()

    transfer = writes.start(work())
    assert not await writes.poll(transfer, timeout_s=0)
    gate.set()
    assert await writes.poll(transfer, timeout_s=1)
    assert await writes.stop(transfer, timeout_s=0, interrupts=False)
    with pytest.raises(KeyError):
        await writes.poll(transfer, timeout_s=0)


async def test_a_failed_write_stays_until_somebody_asked_whether_it_has_stopped() -> None:
    writes = Writes()

    async def work() -> None:
        raise TransferFailed("no")

    transfer = writes.start(work())
    for _ in range(2):
        with pytest.raises(TransferFailed):
            await writes.poll(transfer, timeout_s=1)
    assert await writes.stop(transfer, timeout_s=1, interrupts=False)


async def test_a_write_that_cannot_be_interrupted_has_not_stopped_before_its_end() -> None:
    writes, gate = Writes(), asyncio.Event()

    async def work() -> None:
        await gate.wait()

    transfer = writes.start(work())
    assert not await writes.stop(transfer, timeout_s=0, interrupts=False)
    gate.set()
    assert await writes.stop(transfer, timeout_s=1, interrupts=False)
    interrupted = writes.start(asyncio.sleep(60))
    assert await writes.stop(interrupted, timeout_s=1, interrupts=True)


async def test_a_write_that_is_over_is_told_of_without_a_turn_of_the_event_loop() -> None:
    writes = Writes()
    asking = writes.poll(writes.ended(), timeout_s=0)
    with pytest.raises(StopIteration) as answer:
        asking.send(None)
    assert answer.value.value is True


async def test_a_write_that_had_failed_at_once_is_asked_about_like_any_other() -> None:
    writes = Writes()
    transfer = writes.ended(TransferFailed("no"))
    for _ in range(2):
        with pytest.raises(TransferFailed, match="no"):
            await writes.poll(transfer, timeout_s=0)
    assert await writes.stop(transfer, timeout_s=0, interrupts=False)
    with pytest.raises(KeyError):
        await writes.poll(transfer, timeout_s=0)


async def test_what_is_interrupted_has_ended_when_all_is_closed() -> None:
    writes, has_ended = Writes(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
            has_ended.set()

    assert not await writes.poll(writes.start(work()), timeout_s=0)
    await writes.close()
    assert has_ended.is_set()


@pytest.mark.parametrize("interrupts", [False, True])
async def test_failures_that_nobody_asked_for_are_no_complaints(interrupts: bool) -> None:
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    writes = Writes()

    async def work() -> None:
        raise TransferFailed("no")

    def begin() -> list[TransferId]:
        return [writes.ended(TransferFailed("no")), writes.start(work())]

    stopped = begin()
    await asyncio.sleep(0)
    for transfer in stopped:
        assert await writes.stop(transfer, timeout_s=0, interrupts=interrupts)
    begin()
    await asyncio.sleep(0)
    await writes.close()
    gc.collect()
    assert complaints == []


def test_asking_costs_a_small_share_of_the_wait_and_never_spins() -> None:
    waits = [next_wait_s(waited_s) for waited_s in (0.0, 0.001, 0.02, 0.1, 10.0)]
    assert waits == sorted(waits)
    assert waits[0] > 0
    assert next_wait_s(0.1) == pytest.approx(WAIT_SHARE * 0.1)
    assert waits[-1] == LONGEST_WAIT_S
