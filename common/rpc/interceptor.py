"""Turns what a handler raises into a status, once for all methods. Knows errors; never sees what a method means."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from common.errors import ServingError
from common.rpc.status import status_of

REQUEST_ID_KEY = "x-request-id"
"""Metadata that names a request, on the way in and in the trailer of a failed call."""

logger = logging.getLogger(__name__)

Handler = Callable[[Any, Any], Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call with the status of its `ServingError`, or with INTERNAL and no inner text for anything else.

    Streams of responses become coroutines that write: a generator that is left at a `yield` by a cancelled call is
    closed when the garbage collector comes by, a coroutine is cancelled at once.
    """

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return _guarded(handler, text(handler_call_details.method))


def _guarded(
    handler: grpc.RpcMethodHandler[Any, Any], method: str
) -> grpc.RpcMethodHandler[Any, Any]:
    inner, make_handler = behaviour(handler)
    guard = _guard_writes if inspect.isasyncgenfunction(inner) else _guard_call
    return make_handler(
        guard(inner, method),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def behaviour(
    handler: grpc.RpcMethodHandler[Any, Any],
) -> tuple[Handler, Callable[..., grpc.RpcMethodHandler[Any, Any]]]:
    """What a handler does, and what makes a handler of its kind from another behaviour."""
    # The attributes are there whatever the kind of handler, and set for its own kind only.
    any_handler: Any = handler
    if handler.request_streaming and handler.response_streaming:
        return any_handler.stream_stream, grpc.stream_stream_rpc_method_handler
    if handler.request_streaming:
        return any_handler.stream_unary, grpc.stream_unary_rpc_method_handler
    if handler.response_streaming:
        return any_handler.unary_stream, grpc.unary_stream_rpc_method_handler
    return any_handler.unary_unary, grpc.unary_unary_rpc_method_handler


def _guard_call(inner: Handler, method: str) -> Handler:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with _answering_errors(method, request, context):
            return await inner(request, context)

    return call


def _guard_writes(inner: Handler, method: str) -> Handler:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with (
            _answering_errors(method, request, context),
            aclosing(inner(request, context)) as responses,
        ):
            async for response in responses:
                await context.write(response)

    return call


@contextlib.asynccontextmanager
async def _answering_errors(
    method: str, request: Any, context: grpc.aio.ServicerContext[Any, Any]
) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except ServingError as error:
        trailer = tuple(context.trailing_metadata() or ())
        await context.abort_with_status(status_of(error, metadata=trailer))
    except Exception:
        request_id = _request_id(request, context)
        logger.exception("%s of request %s failed unexpectedly", method, request_id)
        internal = ServingError("internal error; the server's log has it under the request's id")
        await context.abort_with_status(
            status_of(internal, metadata=((REQUEST_ID_KEY, request_id),))
        )


def _request_id(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """What the handler, the message or the caller's metadata says; "-" when none does."""
    named = getattr(request, "request_id", "")
    if isinstance(named, str) and named:
        return named
    for metadata in (context.trailing_metadata(), context.invocation_metadata()):
        for key, value in metadata or ():
            if text(key) == REQUEST_ID_KEY:
                return text(value)
    return "-"


def text(value: str | bytes) -> str:
    """Names and values of metadata are either."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
