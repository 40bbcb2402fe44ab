"""Parts of a hand-off's time. Knows times and bytes; measures nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One write, from its posting to its last byte's arrival, or one wait; seconds on the clock that the engine reads too."""

    began: float
    ended: float
    num_bytes: int = 0


class Spans:
    """Spans of one kind, of which no two overlap."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def add(self, span: Span) -> None:
        self._spans.append(span)

    @property
    def num_bytes(self) -> int:
        return sum(span.num_bytes for span in self._spans)

    @property
    def seconds(self) -> float:
        return sum(span.ended - span.began for span in self._spans)

    def seconds_after(self, at: float) -> float:
        """Seconds of the spans after a time."""
        return sum(max(0.0, span.ended - max(at, span.began)) for span in self._spans)

    def bytes_after(self, at: float) -> int:
        """Bytes of the spans that had not ended at a time."""
        return sum(span.num_bytes for span in self._spans if span.ended > at)
