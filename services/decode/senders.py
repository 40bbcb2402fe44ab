"""Questions to prefill workers whose hand-offs were given up. Knows addresses and generations; no reservations."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc.aio

from common.rpc.channel import open_channel
from common.rpc.liveness import is_gone
from common.transfer import convert
from dspark.v1 import prefill_service_pb2 as pb
from dspark.v1.prefill_service_pb2_grpc import PrefillServiceStub
from services.decode.quarantine import SenderState, Writer

if TYPE_CHECKING:
    # The generated module has the typed stub for type checkers only.
    from dspark.v1.prefill_service_pb2_grpc import PrefillServiceAsyncStub

ASK_TIMEOUT_S = 1.5
"""A sender that stops its engine first may take a second."""


class Senders:
    """A channel per prefill worker that had to be asked, kept."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def stop(self, writer: Writer, capability: bytes) -> SenderState:
        """Have a sender stop writing."""
        if not writer.address:
            return SenderState.UNKNOWN
        has_stopped = False

        async def ask() -> str:
            nonlocal has_stopped
            answer = await self._stub(writer.address).StopHandoff(
                pb.StopHandoffRequest(key=convert.key_to_pb(writer.key), capability=capability),
                timeout=ASK_TIMEOUT_S,
            )
            has_stopped = answer.stopped
            return answer.generation

        if await is_gone(
            writer.address, writer.key.prefill_generation, ask, timeout_s=ASK_TIMEOUT_S
        ):
            return SenderState.GONE
        return SenderState.STOPPED if has_stopped else SenderState.UNKNOWN

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))

    def _stub(self, address: str) -> PrefillServiceAsyncStub:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        return PrefillServiceStub(channel)
