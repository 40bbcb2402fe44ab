"""Spans of a request: which part of it took from when to when, in which process. Knows names and times; never a prompt.

What is measured here does not depend on OpenTelemetry, which is imported by `otel` alone and only when spans are
exported. The span that code runs under is in the task's context, as is the log's trace id; without one everything here
does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from common.errors import ConfigError

TRACEPARENT_KEY = "traceparent"
"""Metadata that carries a trace from process to process, as W3C Trace Context writes it."""

Value = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, Value]
"""By the names of OpenTelemetry's conventions, or below `dspark.`; those with the value "" are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Whether and where spans go."""

    endpoint: str = ""
    """URL of an OTLP collector that speaks gRPC; nothing is traced when empty."""
    sample_ratio: float = 1.0
    """Share of the traces that begin here; whoever began a trace elsewhere has decided already."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.sample_ratio <= 1.0:
            raise ConfigError(f"sample_ratio is {self.sample_ratio}; give a value from 0 to 1")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"tracing.endpoint is {self.endpoint!r}; give a URL such as http://collector:4317"
            )


class Span(Protocol):
    """A part of a request in this process, from its making to `end`. Times are of `time.monotonic`."""

    @property
    def trace_id(self) -> str:
        """32 hex digits."""

    @property
    def traceparent(self) -> str:
        """What continues the trace below this span elsewhere."""

    def child(self, name: str, *, began: float | None = None) -> Span:
        """Begin a part of this part, now or at a time that has passed."""

    def set(self, attributes: Attributes) -> None:
        """Say more of it."""

    def event(self, name: str, attributes: Attributes) -> None:
        """Something happened in it now."""

    def end(self, *, ended: float | None = None, error: str = "") -> None:
        """It is over; `error` is the reason of a failure."""


class Tracing(Protocol):
    """Where spans begin. Both ways return None for a trace that is not recorded."""

    is_on: bool

    def begin(self, name: str, *, traceparent: str = "", began: float | None = None) -> Span | None:
        """A request came in: continue the trace of `traceparent`, or begin one."""

    def join(self, name: str, *, traceparent: str, began: float | None = None) -> Span | None:
        """Work on a request of another process; without its traceparent there is nothing to join."""

    def close(self) -> None:
        """Send what was not sent yet; bounded."""


class NoTracing:
    """Traces nothing."""

    is_on = False

    def begin(self, name: str, *, traceparent: str = "", began: float | None = None) -> Span | None:
        return None

    def join(self, name: str, *, traceparent: str, began: float | None = None) -> Span | None:
        return None

    def close(self) -> None:
        return


OFF = NoTracing()


def open_tracing(config: TracingConfig, *, role: str, version: str) -> Tracing:
    """What the configuration asks for; the caller closes it. Raises ConfigError when the packages for it are missing."""
    if not config.endpoint:
        return OFF
    try:
        from common.telemetry.otel import OtelTracing, otlp_exporter
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracing.endpoint is given, but the package {error.name!r} is not installed; "
            "pip install 'dspark-serving[tracing]' brings it"
        ) from None
    return OtelTracing(
        role=role,
        version=version,
        sample_ratio=config.sample_ratio,
        exporter=otlp_exporter(config.endpoint),
    )


_current: ContextVar[Span | None] = ContextVar("span", default=None)


def current() -> Span | None:
    """The span that this task works under."""
    return _current.get()


@contextlib.contextmanager
def under(span: Span | None) -> Iterator[None]:
    """What the block does, and every task that it begins, is part of a span. None leaves things as they are."""
    if span is None:
        yield
        return
    token = _current.set(span)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Tasks that the block begins belong to no trace: they serve many requests, or outlive the one that began them."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def part(name: str, attributes: Attributes | None = None) -> Iterator[None]:
    """The block is a span of its own below the task's; does nothing without one."""
    above = _current.get()
    if above is None:
        yield
        return
    span = above.child(name)
    span.set(attributes or {})
    error = ""
    try:
        with under(span):
            yield
    except BaseException as failure:
        error = getattr(failure, "reason", type(failure).__name__)
        raise
    finally:
        span.end(error=error)


def record(name: str, *, began: float, ended: float, attributes: Attributes | None = None) -> None:
    """A part of the task's span that is over already."""
    above = _current.get()
    if above is not None:
        span = above.child(name, began=began)
        span.set(attributes or {})
        span.end(ended=max(began, ended))
