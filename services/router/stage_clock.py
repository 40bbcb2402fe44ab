"""Where the time of one request goes. Knows the names of stages and a clock; not what happens in them.

A request is in one stage at any time, so stages add up by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.telemetry.metrics.router import STAGES


class StageClock:
    """Seconds by stage. The clock runs from the first stage's begin to `end`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stage = STAGES[0]
        self.began_at = self._last = clock()
        self._seconds = dict.fromkeys(STAGES, 0.0)

    @property
    def current(self) -> str:
        return self._stage

    def enter(self, stage: str) -> float:
        """Be in another stage from now on; a stage that is entered again goes on. Returns the time of the change."""
        now = self._clock()
        self._seconds[self._stage] += now - self._last
        self._stage, self._last = stage, now
        return now

    def end(self) -> float:
        """The last stage is over. Returns the time of the end."""
        return self.enter(self._stage)

    def split_prefill(self, *, queue_s: float, compute_s: float) -> None:
        """Of the time that a prefill took as seen from here, a worker says what it waited and what it computed.

        The rest went into calls on their way, and into prefills that failed before.
        """
        whole = self._seconds["prefill"]
        queued = min(queue_s, whole)
        computed = min(compute_s, whole - queued)
        self._seconds["prefill"] = computed
        self._seconds["prefill_queue"] += queued
        self._seconds["prefill_rpc"] += whole - queued - computed

    def seconds(self, stages: Iterable[str] = STAGES) -> dict[str, float]:
        """What the stages took so far, without the one that goes on."""
        return {stage: self._seconds[stage] for stage in stages}
