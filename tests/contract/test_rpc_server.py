"""What every service gets from `common.rpc`: errors as statuses for all kinds of calls, limits, a port of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from common.errors import CapacityExhausted, ConfigError, InvalidRequest
from common.rpc.channel import open_channel
from common.rpc.server import build_server
from common.rpc.status import error_of_call
from tests.support.waiting import WAIT_S, in_time

KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]
Failure = Callable[[], Exception]


class Handlers(grpc.GenericRpcHandler):
    """One method of each kind, that yields what it is told and then raises what it is told."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.closed = asyncio.Event()
        self.hold = asyncio.Event()
        self.hold.set()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        kind = details.method.removeprefix("/test.Test/")
        make = getattr(grpc, f"{kind}_rpc_method_handler", None)
        return make(getattr(self, kind)) if make else None

    async def unary_unary(self, request: Any, context: Any) -> bytes:
        return self._answer()

    async def stream_unary(self, request: Any, context: Any) -> bytes:
        return self._answer()

    async def unary_stream(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await self.hold.wait()
            yield self._answer()
        finally:
            self.closed.set()

    async def stream_stream(self, request: Any, context: Any) -> None:
        await context.write(b"first")
        await context.write(self._answer())

    def _answer(self) -> bytes:
        if self.error is not None:
            raise self.error
        return b"done"


@pytest.fixture
async def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
async def channel(handlers: Handlers) -> AsyncIterator[grpc.aio.Channel]:
    server = build_server(
        host="127.0.0.1",
        port=0,
        service_names=("test.Test",),
        register=lambda s: s.add_generic_rpc_handlers((handlers,)),
        max_message_bytes=1024,
    )
    await server.start()
    channel = open_channel(server.address)
    yield channel
    await channel.close()
    await server.stop(0)


async def call(channel: grpc.aio.Channel, kind: str, request: bytes = b"x") -> list[bytes]:
    async def requests() -> AsyncIterator[bytes]:
        yield request

    multicallable: Any = getattr(channel, kind)(f"/test.Test/{kind}")
    result = multicallable(requests() if kind.startswith("stream") else request, timeout=WAIT_S)
    if kind.endswith("stream"):
        return [response async for response in result]
    return [await result]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_goes_well_is_left_alone(channel: grpc.aio.Channel, kind: str) -> None:
    assert (await call(channel, kind))[-1] == b"done"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_serving_error_ends_the_call_with_its_status(
    channel: grpc.aio.Channel, handlers: Handlers, kind: str
) -> None:
    handlers.error = CapacityExhausted("no pages", retry_after_s=2.0, metadata={"free": "0"})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, kind)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = error_of_call(caught.value, peer="test")
    assert isinstance(error, CapacityExhausted)
    assert (error.message, error.retry_after_s, error.metadata) == ("no pages", 2.0, {"free": "0"})


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_error_is_logged_and_tells_the_caller_nothing(
    channel: grpc.aio.Channel, handlers: Handlers, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    handlers.error = ZeroDivisionError("secret detail")
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, kind)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value.details())
    assert "secret detail" in caplog.text
    assert f"/test.Test/{kind}" in caplog.text


async def test_a_cancelled_call_closes_its_generator_at_once(
    channel: grpc.aio.Channel, handlers: Handlers
) -> None:
    handlers.hold.clear()
    multicallable: Any = channel.unary_stream("/test.Test/unary_stream")
    stream = multicallable(b"x")
    assert await anext(aiter(stream)) == b"first"
    stream.cancel()
    await in_time(handlers.closed.wait(), 1.0)


async def test_an_oversized_message_is_refused_as_the_callers_mistake(
    channel: grpc.aio.Channel,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, "unary_unary", b"x" * 2000)
    assert isinstance(error_of_call(caught.value, peer="test"), InvalidRequest)


async def test_an_unknown_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    multicallable: Any = channel.unary_unary("/test.Test/nothing")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await multicallable(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_port_in_use_is_a_configuration_error() -> None:
    def build(port: int) -> Any:
        return build_server(host="127.0.0.1", port=port, service_names=(), register=lambda s: None)

    first = build(0)
    await first.start()
    with pytest.raises(ConfigError, match=str(first.port)):
        build(first.port)
    await first.stop(0)
