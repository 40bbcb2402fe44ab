"""Writes under way, by id. Knows tasks and waiting; not what a write does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

from common.transfer.engine import TransferId

FIRST_WAIT_S = 0.000_2
LONGEST_WAIT_S = 0.02
WAIT_SHARE = 0.05


class Writes:
    """The bookkeeping that engines share: each write is a task that ends when its write has certainly stopped."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._tasks: dict[TransferId, asyncio.Task[None]] = {}

    def start(self, work: Coroutine[Any, Any, None]) -> TransferId:
        transfer = TransferId(next(self._ids))
        self._tasks[transfer] = asyncio.create_task(work)
        return transfer

    async def poll(self, transfer: TransferId, *, timeout_s: float) -> bool:
        """As `TransferEngine.poll`."""
        task = self._tasks[transfer]
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            return False
        task.result()
        del self._tasks[transfer]
        return True

    async def stop(self, transfer: TransferId, *, timeout_s: float, interrupts: bool) -> bool:
        """As `TransferEngine.cancel`. Interrupt only what has stopped once its task was cancelled."""
        task = self._tasks.get(transfer)
        if task is None:
            return True
        if interrupts:
            task.cancel()
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            return False
        if not task.cancelled():
            task.exception()  # it was the caller's to hear of by `poll`
        self._tasks.pop(transfer, None)
        return True

    async def close(self) -> None:
        """Interrupt everything."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def next_wait_s(waited_s: float) -> float:
    """How long to sleep before something is asked for its end again: a small share of what it has taken so far."""
    return min(LONGEST_WAIT_S, max(FIRST_WAIT_S, WAIT_SHARE * waited_s))
