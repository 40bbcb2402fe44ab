"""Spans as OpenTelemetry has them, sent to a collector. Knows its SDK; imported only when spans are exported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.telemetry.tracing import TRACEPARENT_KEY, Attributes, Span, Value

CLOSE_S = 3.0
EXPORT_TIMEOUT_S = 3.0
_PROPAGATOR = TraceContextTextMapPropagator()


def otlp_exporter(endpoint: str) -> SpanExporter:
    """To a collector at an URL, over TLS when it says https. Headers, such as a key, come as OTEL_EXPORTER_OTLP_HEADERS."""
    return OTLPSpanExporter(
        endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=EXPORT_TIMEOUT_S
    )


class OtelTracing:
    """Spans of one process. Owns its provider; no global one is set."""

    is_on = True

    def __init__(
        self,
        *,
        role: str,
        version: str,
        sample_ratio: float,
        exporter: SpanExporter,
        is_batched: bool = True,
    ) -> None:
        """`exporter` gets the spans that end, in batches on a thread of its own, or each at once."""
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create(
                {"service.name": f"dspark-{role}", "service.version": version}
            ),
            shutdown_on_exit=False,
        )
        make = BatchSpanProcessor if is_batched else SimpleSpanProcessor
        self._provider.add_span_processor(make(exporter))
        self._tracer = self._provider.get_tracer("dspark", version)
        self._to_ns = _wall_clock_ns()

    def begin(self, name: str, *, traceparent: str = "", began: float | None = None) -> Span | None:
        above = _PROPAGATOR.extract({TRACEPARENT_KEY: traceparent}) if traceparent else None
        return self._started(name, above, began)

    def join(self, name: str, *, traceparent: str, began: float | None = None) -> Span | None:
        if not traceparent:
            return None
        above = _PROPAGATOR.extract({TRACEPARENT_KEY: traceparent})
        is_valid = trace.get_current_span(above).get_span_context().is_valid
        return self._started(name, above, began) if is_valid else None

    def close(self) -> None:
        self._provider.force_flush(int(CLOSE_S * 1e3))
        self._provider.shutdown()

    def _started(self, name: str, above: Any, began: float | None) -> Span | None:
        start_ns = self._to_ns(time.monotonic() if began is None else began)
        # An empty context, not the ambient one: what a span belongs to is always said.
        above = above if above is not None else trace.set_span_in_context(trace.INVALID_SPAN)
        span = self._tracer.start_span(name, above, kind=trace.SpanKind.SERVER, start_time=start_ns)
        return OtelSpan(span, self._tracer, self._to_ns) if span.is_recording() else None


class OtelSpan:
    """One span that is recorded."""

    def __init__(
        self, span: trace.Span, tracer: trace.Tracer, to_ns: Callable[[float], int]
    ) -> None:
        self._span = span
        self._tracer = tracer
        self._to_ns = to_ns

    @property
    def trace_id(self) -> str:
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
        return carrier[TRACEPARENT_KEY]

    def child(self, name: str, *, began: float | None = None) -> Span:
        span = self._tracer.start_span(
            name,
            trace.set_span_in_context(self._span),
            start_time=self._to_ns(time.monotonic() if began is None else began),
        )
        return OtelSpan(span, self._tracer, self._to_ns)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(_said(attributes))

    def event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, _said(attributes))

    def end(self, *, ended: float | None = None, error: str = "") -> None:
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end(self._to_ns(time.monotonic() if ended is None else ended))


def _said(attributes: Attributes) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value != ""}


def _wall_clock_ns() -> Callable[[float], int]:
    """From monotonic seconds to nanoseconds since 1970, by the offset of now."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda seconds: offset_ns + int(seconds * 1e9)
