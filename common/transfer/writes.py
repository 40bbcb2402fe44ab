"""Writes under way, by id. Knows tasks and waiting; not what a write does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

from common.errors import TransferFailed
from common.transfer.engine import TransferId

FIRST_WAIT_S = 0.000_2
LONGEST_WAIT_S = 0.02
WAIT_SHARE = 0.05


class Writes:
    """The bookkeeping that engines share: each write is a future that is done when its write has certainly stopped."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._futures: dict[TransferId, asyncio.Future[None]] = {}

    def start(self, work: Coroutine[Any, Any, None]) -> TransferId:
        return self._add(asyncio.create_task(work))

    def ended(self, error: TransferFailed | None = None) -> TransferId:
        """One that was over before it could be waited for."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
        return self._add(future)

    async def poll(self, transfer: TransferId, *, timeout_s: float) -> bool:
        """As `TransferEngine.poll`."""
        future = self._futures[transfer]
        if not await _is_done(future, timeout_s):
            return False
        future.result()
        del self._futures[transfer]
        return True

    async def stop(self, transfer: TransferId, *, timeout_s: float, interrupts: bool) -> bool:
        """As `TransferEngine.cancel`. Interrupt only what has stopped once its task was cancelled."""
        future = self._futures.get(transfer)
        if future is None:
            return True
        if interrupts:
            future.cancel()
        if not await _is_done(future, timeout_s):
            return False
        if not future.cancelled():
            future.exception()  # it was the caller's to hear of by `poll`
        self._futures.pop(transfer, None)
        return True

    async def close(self) -> None:
        """Interrupt everything."""
        futures = list(self._futures.values())
        self._futures.clear()
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)

    def _add(self, future: asyncio.Future[None]) -> TransferId:
        transfer = TransferId(next(self._ids))
        self._futures[transfer] = future
        return transfer


async def _is_done(future: asyncio.Future[None], timeout_s: float) -> bool:
    if not future.done():
        await asyncio.wait([future], timeout=timeout_s)
    return future.done()


def next_wait_s(waited_s: float) -> float:
    """How long to sleep before something is asked for its end again: a small share of what it has taken so far."""
    return min(LONGEST_WAIT_S, max(FIRST_WAIT_S, WAIT_SHARE * waited_s))
