"""The bookkeeping of writes: what may be said of one, and when it is forgotten."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import TransferFailed
from common.transfer.writes import LONGEST_WAIT_S, WAIT_SHARE, Writes, next_wait_s


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


def test_asking_costs_a_small_share_of_the_wait_and_never_spins() -> None:
    waits = [next_wait_s(waited_s) for waited_s in (0.0, 0.001, 0.02, 0.1, 10.0)]
    assert waits == sorted(waits)
    assert waits[0] > 0
    assert next_wait_s(0.1) == pytest.approx(WAIT_SHARE * 0.1)
    assert waits[-1] == LONGEST_WAIT_S
