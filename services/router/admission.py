"""The queue of requests that wait for a place. Knows order, pace and deadlines; never sees a worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from common.errors import DeadlinePassed, QueueFull
from services.router.config import QueueConfig

ROOM_RECHECK_S = 0.25
"""Room that other routers' requests leave is not heard of, only found."""

_MIN_RETRY_S = 0.1
_PACE_WEIGHT = 0.2


class AdmissionQueue:
    """First come, first served, with a few turns at the head."""

    def __init__(self, config: QueueConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._turns = asyncio.Semaphore(config.num_turns)
        self._room = asyncio.Event()
        self._pace_s = 0.0
        """Seconds between two placements, averaged while requests waited."""
        self._last_turn_end: float | None = None
        self.num_waiting = 0

    @contextlib.asynccontextmanager
    async def turn(self, deadline: float) -> AsyncIterator[None]:
        """A turn at the head of the queue, held until the block ends.

        Raises QueueFull when too many wait, DeadlinePassed when `deadline` (on the queue's clock) comes before the
        turn can be expected.
        """
        self._refuse_hopeless(deadline)
        self.num_waiting += 1
        try:
            async with self._turns:
                yield
                self._note_pace()
        finally:
            self.num_waiting -= 1

    async def room(self) -> None:
        """Wait until there may be room for a request that found none; at most `ROOM_RECHECK_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROOM_RECHECK_S):
                await self._room.wait()

    def notify_room(self) -> None:
        """Something ended or a worker changed: whoever waits for room tries again."""
        self._room.set()
        self._room = asyncio.Event()

    def expected_wait_s(self) -> float:
        """Seconds that a request which comes now will probably wait; 0 as long as nothing is known."""
        num_before = max(0, self.num_waiting - self._config.num_turns + 1)
        return num_before * self._pace_s

    def retry_after_s(self) -> float:
        return max(_MIN_RETRY_S, self.expected_wait_s())

    def _refuse_hopeless(self, deadline: float) -> None:
        if self.num_waiting >= self._config.max_queued:
            raise QueueFull(
                f"{self.num_waiting} requests wait already",
                retry_after_s=self.retry_after_s(),
                metadata={"queued": str(self.num_waiting)},
            )
        left_s, wait_s = deadline - self._clock(), self.expected_wait_s()
        if wait_s > left_s:
            raise DeadlinePassed(
                f"the deadline is in {left_s:.2f} s, but a place is expected in {wait_s:.2f} s",
                metadata={"stage": "queue"},
            )

    def _note_pace(self) -> None:
        now = self._clock()
        is_backlogged = self.num_waiting > self._config.num_turns
        if self._last_turn_end is not None and is_backlogged:
            self._pace_s += _PACE_WEIGHT * (now - self._last_turn_end - self._pace_s)
        self._last_turn_end = now if is_backlogged else None
