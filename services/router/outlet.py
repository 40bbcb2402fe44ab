"""Between a request and its client. Knows order and pace; never sees what a chunk means."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from services.router.requests import Chunk


class Outlet:
    """Chunks of one request. The pipeline puts and waits until they are taken, so that a slow client pauses its request.

    `put` and waiting are two steps: what was put is delivered even if the wait is cancelled.
    """

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self._is_closed = False
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._emptied.clear()
        self._filled.set()

    async def taken(self) -> None:
        """Wait until the client has taken all that was put; whoever calls this bounds the wait."""
        await self._emptied.wait()

    def close(self) -> None:
        """No more chunks come; those that are here can still be taken."""
        self._is_closed = True
        self._filled.set()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while True:
            await self._filled.wait()
            if not self._chunks:
                return
            yield self._chunks.popleft()
            if not self._chunks:
                self._emptied.set()
                if not self._is_closed:
                    self._filled.clear()
