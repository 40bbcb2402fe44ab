"""How much of the time, and how fast, this worker writes to peers. Knows durations and bytes; writes nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.telemetry.metrics import TransferMetrics


@dataclass(slots=True)
class Writing:
    """One write."""

    engine: str
    seconds: float = 0.0
    """Set when it has ended, well or not."""


class LinkMeter:
    """Counts the writes of one worker. They may overlap; the time in which any is under way is counted once."""

    def __init__(
        self, metrics: TransferMetrics, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._num_under_way = 0
        self._counted_until = 0.0
        self._fastest: dict[str, float] = {}

    @contextlib.contextmanager
    def writing(self, engine: str) -> Iterator[Writing]:
        """A write is under way until the block ends."""
        writing = Writing(engine)
        began = self._change(+1)
        try:
            yield writing
        finally:
            writing.seconds = self._change(-1) - began
            self._metrics.duration.labels(engine=engine).observe(writing.seconds)

    def wrote(self, writing: Writing, num_bytes: int) -> None:
        """All bytes of a write have arrived."""
        engine = writing.engine
        rate = num_bytes / max(writing.seconds, 1e-9)
        self._metrics.bytes.labels(engine=engine).inc(num_bytes)
        self._metrics.rate.labels(engine=engine).observe(rate)
        if rate > self._fastest.get(engine, 0.0):
            self._fastest[engine] = rate
            self._metrics.link_rate.labels(engine=engine).set(rate)

    def _change(self, difference: int) -> float:
        now = self._clock()
        if self._num_under_way:
            self._metrics.link_busy.inc(now - self._counted_until)
        self._counted_until = now
        self._num_under_way += difference
        return now
