"""A prefill worker's connection to a decode worker that went away and came back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from dspark.v1 import decode_service_pb2
from dspark.v1.decode_service_pb2_grpc import DecodeServiceStub
from services.cli.ports import free_ports
from services.prefill.peers import RECONNECT_S, Peers
from tests.support.fake_workers import FakeDecode, serving
from tests.support.waiting import WAIT_S, in_time

FAILED = grpc.ChannelConnectivity.TRANSIENT_FAILURE


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    peers = Peers()
    yield peers
    await peers.close()


@pytest.fixture
def port() -> int:
    (port,) = free_ports("127.0.0.1", 1)
    return port


async def ask(peers: Peers, address: str) -> None:
    request = decode_service_pb2.DecodeServiceGetWorkerInfoRequest()
    await DecodeServiceStub(peers.channel(address)).GetWorkerInfo(request, timeout=WAIT_S)


async def fail_to_connect(peers: Peers, address: str) -> None:
    """A call has failed, and the next one would do so at once."""
    with pytest.raises(grpc.aio.AioRpcError):
        await ask(peers, address)
    channel = peers.channel(address)
    async with asyncio.timeout(WAIT_S):
        while (state := channel.get_state()) is not FAILED:
            await channel.wait_for_state_change(state)


async def test_a_decode_worker_that_has_come_back_is_reached_at_once(
    peers: Peers, port: int
) -> None:
    """Requests used to fail three times within a moment while the channel waited to connect again."""
    address = f"127.0.0.1:{port}"
    for _ in range(3):  # the later, the longer the channel waits
        await fail_to_connect(peers, address)
        async with serving(FakeDecode([]), port=port):
            await peers.wait_connected(address)
            await ask(peers, address)


async def test_one_that_refuses_connections_is_not_waited_for(peers: Peers, port: int) -> None:
    address = f"127.0.0.1:{port}"
    await fail_to_connect(peers, address)
    await in_time(peers.wait_connected(address), RECONNECT_S / 4)
    with pytest.raises(grpc.aio.AioRpcError):
        await ask(peers, address)


async def test_one_that_accepts_and_says_nothing_is_waited_for_in_vain(
    peers: Peers, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.prefill.peers.RECONNECT_S", 0.3)
    address = f"127.0.0.1:{port}"
    await fail_to_connect(peers, address)
    connections: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(
        lambda _, writer: connections.append(writer), "127.0.0.1", port
    )
    await in_time(peers.wait_connected(address), WAIT_S)
    assert peers.channel(address).get_state() is FAILED
    for writer in connections:
        with contextlib.suppress(OSError):
            writer.close()
    silent.close()
    await silent.wait_closed()
