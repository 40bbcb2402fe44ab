"""Waits that a busy machine cannot break. Knows event loops; nothing of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

WAIT_S = 60.0
"""Far above anything that happens in tests; only a failing one waits so long."""
LOOK_S = 0.002
TURN_S = 0.01


async def until(condition: Callable[[], bool]) -> None:
    """Return once it holds; for what no message announces."""
    for _ in range(int(WAIT_S / LOOK_S)):
        if condition():
            return
        await asyncio.sleep(LOOK_S)
    raise AssertionError("it did not come about")


async def in_time(work: Coroutine[Any, Any, Result], seconds: float) -> Result:
    """The result of something that is promised within a time.

    Time is counted in turns of the event loop that would take a hundredth of a second each: when the machine has no time
    for this process, it stands still. A timer of our own that is too long is noticed all the same.
    """
    task = asyncio.ensure_future(work)
    for _ in range(round(seconds / TURN_S)):
        done, _ = await asyncio.wait([task], timeout=TURN_S)
        if done:
            return task.result()
    task.cancel()
    raise AssertionError(f"it took more than {seconds} s")
