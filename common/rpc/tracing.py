"""Carries traces across calls between services: a header on the way out, a span on the way in. Knows no service by name.

A stream that many requests share cannot carry one trace; there each request's own message names it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from common.rpc.interceptor import Handler, behaviour, text
from common.telemetry.tracing import TRACEPARENT_KEY, Tracing, current, under

Handlers = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]


def server_interceptors(tracing: Tracing) -> Sequence[grpc.aio.ServerInterceptor]:
    """None when nothing is traced, so that it costs nothing."""
    return (TracingServer(tracing),) if tracing.is_on else ()


def client_interceptors(tracing: Tracing) -> Sequence[grpc.aio.ClientInterceptor]:
    """None when nothing is traced, so that it costs nothing."""
    return (TracingCall(), TracingStream()) if tracing.is_on else ()


def traceparent_of(metadata: Any) -> str:
    """What a call's metadata says; empty when it says nothing."""
    for key, value in metadata or ():
        if key == TRACEPARENT_KEY:
            return text(value)
    return ""


class TracingServer(grpc.aio.ServerInterceptor):
    """A span for every call that belongs to a trace, and the handler works under it."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self, continuation: Handlers, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        traceparent = traceparent_of(handler_call_details.invocation_metadata)
        if handler is None or not traceparent:
            return handler
        inner, make_handler = behaviour(handler)
        return make_handler(
            self._traced(inner, text(handler_call_details.method).lstrip("/"), traceparent),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _traced(self, inner: Handler, method: str, traceparent: str) -> Handler:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            span = self._tracing.join(method, traceparent=traceparent)
            if span is None:
                return await inner(request, context)
            service, _, name = method.rpartition("/")
            span.set({"rpc.system": "grpc", "rpc.service": service, "rpc.method": name})
            error = "CANCELLED"
            try:
                with under(span):
                    answer = await inner(request, context)
                error = ""
                return answer
            except grpc.aio.AbortError:
                error = context.code().name
                raise
            finally:
                span.end(error=error)

        return call


class TracingCall(grpc.aio.UnaryUnaryClientInterceptor):
    """Names the trace of whoever calls."""

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(_traced_details(client_call_details), request)


class TracingStream(grpc.aio.UnaryStreamClientInterceptor):
    """The same for a call with a stream of answers."""

    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(_traced_details(client_call_details), request)


def _traced_details(details: Any) -> Any:
    span = current()
    if span is None:
        return details
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    metadata.add(TRACEPARENT_KEY, span.traceparent)
    return details._replace(metadata=metadata)
