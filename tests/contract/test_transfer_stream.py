"""Bytes over a call whose receiver may end it before it has read everything."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest

from common.errors import CapabilityRefused, ServingError, TransferFailed, WorkerLost
from common.rpc import transfer_stream
from common.rpc.channel import open_channel
from common.rpc.server import build_server
from tests.support.waiting import WAIT_S

TIMES = 100
NUM_MESSAGES = 8


class Receiver:
    """Refuses a call, or its fourth write, or nothing."""

    def __init__(self) -> None:
        self.refuses: ServingError | None = None
        self.refuses_write: ServingError | None = None
        self.written: list[bytes] = []

    def authorize(self, key: bytes, capability: bytes) -> transfer_stream.Write:
        if self.refuses is not None:
            raise self.refuses
        return self._write

    def _write(self, region: int, offset: int, payload: memoryview) -> None:
        if self.refuses_write is not None and offset == 3:
            raise self.refuses_write
        self.written.append(bytes(payload))


@pytest.fixture
async def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
async def channel(receiver: Receiver) -> AsyncIterator[grpc.aio.Channel]:
    handler = transfer_stream.handler(receiver.authorize)
    server = build_server(
        host="127.0.0.1",
        port=0,
        service_names=(),
        register=lambda s: s.add_generic_rpc_handlers((handler,)),
    )
    await server.start()
    channel = open_channel(server.address)
    yield channel
    await channel.close()
    await server.stop(0)


def messages(payload: bytes) -> Iterator[bytes]:
    for offset in range(NUM_MESSAGES):
        yield from transfer_stream.pack([transfer_stream.Piece(0, offset, memoryview(payload))])


async def send(channel: grpc.aio.Channel, payload: bytes) -> int:
    return await transfer_stream.send(
        channel, messages(payload), peer="peer", key=b"k", capability=b"c", timeout_s=WAIT_S
    )


async def test_everything_arrives_in_order(channel: grpc.aio.Channel, receiver: Receiver) -> None:
    assert await send(channel, b"abc") == 3 * NUM_MESSAGES
    assert receiver.written == [b"abc"] * NUM_MESSAGES


@pytest.mark.parametrize("num_bytes", [10, 100_000])
@pytest.mark.parametrize("when", ["at once", "later"])
async def test_a_refusal_keeps_its_name_whatever_is_being_written_when_it_comes(
    channel: grpc.aio.Channel, receiver: Receiver, when: str, num_bytes: int
) -> None:
    """It used to be lost nearly every time: gRPC calls a write internal that fails because the call has ended, and forgets
    the answer that the call has ended with."""
    if when == "at once":
        receiver.refuses = CapabilityRefused("not yours")
    else:
        receiver.refuses_write = TransferFailed("no more")
    expected = receiver.refuses or receiver.refuses_write
    for _ in range(TIMES):
        with pytest.raises(ServingError) as caught:
            await send(channel, bytes(num_bytes))
        assert (type(caught.value), str(caught.value)) == (type(expected), str(expected))


async def test_a_receiver_that_is_gone_is_named() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(WorkerLost, match="peer"):
            await send(channel, b"x")
