"""Spans that end in this process, kept for a test to look at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from common.telemetry.otel import OtelTracing

WAIT_S = 30.0


class Kept(SpanExporter):
    """All spans of all roles, in the order of their ends."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []
        self._changed = threading.Condition()

    def tracing(self, role: str, *, sample_ratio: float = 1.0) -> OtelTracing:
        """A role's tracing, which exports each span here as it ends."""
        return OtelTracing(
            role=role, version="0", sample_ratio=sample_ratio, exporter=self, is_batched=False
        )

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._changed:
            self._spans += spans
            self._changed.notify_all()
        return SpanExportResult.SUCCESS

    def until(self, is_enough: Callable[[list[ReadableSpan]], bool]) -> list[ReadableSpan]:
        """What is here once it is enough."""
        with self._changed:
            assert self._changed.wait_for(lambda: is_enough(self._spans), WAIT_S), names(
                self._spans
            )
            return list(self._spans)

    def clear(self) -> None:
        with self._changed:
            self._spans.clear()


def names(spans: Sequence[ReadableSpan]) -> list[str]:
    return [f"{role_of(span)} {span.name}" for span in spans]


def role_of(span: ReadableSpan) -> str:
    """The role of the process that the span is of."""
    return str(span.resource.attributes["service.name"]).removeprefix("dspark-")


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9
