"""Spans that end in this process, kept for a test to look at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from common.telemetry.otel import OtelTracing
from tests.support.waiting import WAIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A span."""

    role: str
    """Of the process that it is of."""
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty where the trace begins."""
    is_entry: bool
    """Whether it has no parent in this process."""
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    is_error: bool

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9


class Kept(SpanExporter):
    """All spans of all roles, in the order of their ends."""

    def __init__(self) -> None:
        self._spans: list[Ended] = []
        self._changed = threading.Condition()

    def tracing(self, role: str, *, sample_ratio: float = 1.0) -> OtelTracing:
        """A role's tracing, which exports each span here as it ends."""
        return OtelTracing(
            role=role, version="0", sample_ratio=sample_ratio, exporter=self, is_batched=False
        )

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._changed:
            self._spans += map(_ended, spans)
            self._changed.notify_all()
        return SpanExportResult.SUCCESS

    def until(self, is_enough: Callable[[list[Ended]], bool]) -> list[Ended]:
        """What is here once it is enough."""
        with self._changed:
            if not self._changed.wait_for(lambda: is_enough(self._spans), WAIT_S):
                raise AssertionError(f"only {[(span.role, span.name) for span in self._spans]}")
            return list(self._spans)

    def now(self) -> list[Ended]:
        return list(self._spans)

    def clear(self) -> None:
        with self._changed:
            self._spans.clear()


def _ended(span: ReadableSpan) -> Ended:
    context = span.get_span_context()
    assert context is not None and span.start_time is not None and span.end_time is not None
    return Ended(
        role=str(span.resource.attributes["service.name"]).removeprefix("dspark-"),
        name=span.name,
        kind=span.kind.name,
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id="" if span.parent is None else f"{span.parent.span_id:016x}",
        is_entry=span.parent is None or span.parent.is_remote,
        began_ns=span.start_time,
        ended_ns=span.end_time,
        attributes=dict(span.attributes or {}),
        events=[(event.name, dict(event.attributes or {})) for event in span.events],
        is_error=not span.status.is_ok and span.status.description is not None,
    )
