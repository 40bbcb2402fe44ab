"""Reads what will be wanted soon while something else is being used, from several files at once. Knows ranges of files."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from common.checkpoint.mapped import MappedFile
from common.checkpoint.spans import Span

NUM_THREADS = 4
WINDOW_BYTES = 2 << 30
"""How far reading may be ahead of use; what is read sits in the system's cache, not in this process."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What will be used together."""

    spans: tuple[tuple[MappedFile, Span], ...]
    num_bytes: int
    """As `used` will count them; the spans may have more."""


class ReadAhead:
    """Asks for what is wanted in its order, at most a window ahead of what `used` has reported."""

    def __init__(
        self,
        wanted: Iterable[Wanted],
        *,
        window_bytes: int = WINDOW_BYTES,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self._wanted = iter(wanted)
        self._window_bytes = window_bytes
        self._ahead_bytes = 0
        self._is_closed = False
        self._room = threading.Condition()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="read-ahead")
        self._done = [self._pool.submit(self._run) for _ in range(num_threads)]

    def used(self, num_bytes: int) -> None:
        with self._room:
            self._ahead_bytes -= num_bytes
            self._room.notify_all()

    def close(self) -> None:
        """Stop, wait for what is being asked for, and raise what went wrong."""
        with self._room:
            self._is_closed = True
            self._room.notify_all()
        self._pool.shutdown()
        for future in self._done:
            future.result()

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            for file, span in wanted.spans:
                file.expect(span)

    def _next(self) -> Wanted | None:
        with self._room:
            while self._ahead_bytes >= self._window_bytes and not self._is_closed:
                self._room.wait(timeout=1.0)
            wanted = None if self._is_closed else next(self._wanted, None)
            if wanted is not None:
                self._ahead_bytes += wanted.num_bytes
            return wanted
