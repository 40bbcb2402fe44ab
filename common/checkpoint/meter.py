"""How quickly weights arrive. Knows bytes and seconds; reads nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

JUDGED_AFTER_S = 2.0
"""What loads more quickly is nobody's concern."""
WAITING_SHARE = 0.5
"""Storage is blamed when at least so much of the time went into waiting for it."""


class LoadMeter:
    """Counts bytes and warns, once, when storage is slower than it should be.

    Any thread may count; `num_readers` of them do so at a time.
    `slow_mb_per_s` is the rate in 10^6 bytes per second below which there is a warning; 0 never warns.
    """

    def __init__(
        self,
        source: Path,
        *,
        slow_mb_per_s: float,
        num_readers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._slow_mb_per_s = slow_mb_per_s
        self._num_readers = num_readers
        self._clock = clock
        self._began = clock()
        self._waiting = threading.local()
        self._waited_s = 0.0
        self._has_warned = False
        self._lock = threading.Lock()
        self.num_bytes = 0

    @property
    def mb_per_s(self) -> float:
        """Over everything so far, dequantisation included."""
        return self.num_bytes / 1e6 / max(self._clock() - self._began, 1e-9)

    def __enter__(self) -> LoadMeter:
        """This thread begins to wait for storage."""
        self._waiting.since = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._waited_s += (self._clock() - self._waiting.since) / self._num_readers

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self._judge(self._clock() - self._began)

    def _judge(self, elapsed_s: float) -> None:
        is_slow = (
            elapsed_s > JUDGED_AFTER_S
            and self._waited_s > WAITING_SHARE * elapsed_s
            and self.mb_per_s < self._slow_mb_per_s
        )
        if is_slow and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s gives %.0f MB/s and loading waits for it %.0f %% of the time; below %.0f MB/s a copy on a local "
                "disk starts sooner",
                self._source,
                self.mb_per_s,
                100 * self._waited_s / elapsed_s,
                self._slow_mb_per_s,
            )
