"""Connections to decode workers. Knows addresses; not what is said over them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from common.rpc.channel import open_channel
from common.rpc.liveness import is_gone, is_refused
from dspark.v1 import decode_service_pb2
from dspark.v1.decode_service_pb2_grpc import DecodeServiceStub
from dspark.v1.handoff_service_pb2_grpc import HandoffServiceStub

if TYPE_CHECKING:
    # The generated module has the typed stub for type checkers only.
    from dspark.v1.decode_service_pb2_grpc import DecodeServiceAsyncStub
    from dspark.v1.handoff_service_pb2_grpc import HandoffServiceAsyncStub


RECONNECT_S = 2.0
"""Several times what a channel waits before it connects again."""


class Peers:
    """One channel per decode worker, opened when it is first heard of and kept: control and bytes share it."""

    def __init__(self, interceptors: Sequence[grpc.aio.ClientInterceptor] = ()) -> None:
        """`interceptors` see every call to a decode worker."""
        self._interceptors = interceptors
        self._channels: dict[str, grpc.aio.Channel] = {}

    def channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = open_channel(address, interceptors=self._interceptors)
            self._channels[address] = channel
            channel.get_state(try_to_connect=True)
        return channel

    def handoff_stub(self, address: str) -> HandoffServiceAsyncStub:
        return HandoffServiceStub(self.channel(address))

    async def wait_connected(self, address: str) -> None:
        """Return when a call has its chance; says nothing about how it will end.

        A channel that could not connect fails calls at once until it has tried again, and a worker that was restarted
        is back sooner than that. One that refuses connections is not waited for.
        """
        channel = self.channel(address)
        if channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            return
        if await is_refused(address, timeout_s=RECONNECT_S):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT_S):
                await channel.channel_ready()

    async def is_gone(self, address: str, generation: str, *, timeout_s: float) -> bool:
        """Whether the decode worker of that generation has certainly ended."""
        stub: DecodeServiceAsyncStub = DecodeServiceStub(self.channel(address))

        async def ask() -> str:
            request = decode_service_pb2.DecodeServiceGetWorkerInfoRequest()
            return (await stub.GetWorkerInfo(request, timeout=timeout_s)).info.generation

        return await is_gone(address, generation, ask, timeout_s=timeout_s)

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))
