"""Who gets the worker's pages and slots, and in which order. Knows lengths; no requests."""

from __future__ import annotations

import asyncio
from collections import deque

from common.engine.memory import Memory, RequestMemory
from common.errors import CapacityExhausted, QueueFull
from common.kv_cache.layout import num_pages_for
from services.prefill.leases import Lease, Leases


class Room:
    """The memory of a prefill worker: first come, first served, leases giving way to requests."""

    def __init__(self, memory: Memory, leases: Leases, *, max_queued: int) -> None:
        self.memory = memory
        self.leases = leases
        self._max_queued = max_queued
        self._queue: deque[tuple[int, asyncio.Future[RequestMemory]]] = deque()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    async def acquire(self, max_length: int) -> RequestMemory:
        """Room with pages for `max_length` tokens, once there is; the caller gives it back with `release`.

        Raises QueueFull when too many wait, CapacityExhausted when the request is larger than the worker.
        """
        num_pages = num_pages_for(max_length)
        if num_pages > self.memory.max_request_pages:
            raise CapacityExhausted(
                f"the request needs {num_pages} pages; "
                f"at most {self.memory.max_request_pages} go to one request here"
            )
        if not self._queue:
            room = self._take(max_length)
            if room is not None:
                return room
        if len(self._queue) >= self._max_queued:
            raise QueueFull(f"{len(self._queue)} requests wait for room already", retry_after_s=1.0)
        turn: asyncio.Future[RequestMemory] = asyncio.get_running_loop().create_future()
        self._queue.append((max_length, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(turn.result())
            else:
                # It may have kept smaller requests behind it waiting.
                self._queue.remove((max_length, turn))
                self.serve_queue()
            raise

    def release(self, memory: RequestMemory) -> None:
        """Take room back, which may be somebody's turn."""
        memory.release()
        self.serve_queue()

    def close_lease(self, lease: Lease) -> None:
        """A reader of a lease has certainly stopped, which may be somebody's turn."""
        self.leases.close(lease)
        self.serve_queue()

    def serve_queue(self) -> None:
        """Give room to those in front; called whenever some became free."""
        while self._queue:
            max_length, turn = self._queue[0]
            if turn.cancelled():
                self._queue.popleft()
                continue
            room = self._take(max_length)
            if room is None:
                return
            self._queue.popleft()
            turn.set_result(room)

    def _take(self, max_length: int) -> RequestMemory | None:
        while True:
            try:
                memory = self.memory.reserve(max_length)
            except CapacityExhausted:
                # A lease is a favour to requests that ran; the next one comes first.
                lease = self._next_to_go(num_pages_for(max_length))
                if lease is None:
                    return None
                self.leases.evict(lease)
                continue
            memory.take_all()
            return memory

    def _next_to_go(self, num_pages: int) -> Lease | None:
        """The lease that ends for a request of so many pages, which fits nowhere; None when that would not help."""
        if self.memory.num_groups == 1:
            return next(iter(self.leases.unread(0)), None)
        victims = [self._victims(num_pages, group) for group in range(self.memory.num_groups)]
        return min((each for each in victims if each), key=len, default=[None])[0]

    def _victims(self, num_pages: int, group: int) -> list[Lease]:
        """The leases that make room in a group if they end, oldest first; empty when all of them were too few."""
        unread = self.leases.unread(group)
        for count in range(1, len(unread) + 1):
            released = [lease.memory for lease in unread[:count]]
            if self.memory.would_fit(num_pages, group, without=released):
                return unread[:count]
        return []
