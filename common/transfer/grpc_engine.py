"""The transfer engine that is always there: bytes over a gRPC stream. Knows ranges and channels; no rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc.aio

from common.errors import TransferFailed
from common.rpc import transfer_stream
from common.transfer.convert import key_to_pb
from common.transfer.engine import TransferId, WriteTarget
from common.transfer.meeting import EngineDescriptor
from common.transfer.memory import PoolMemory
from common.transfer.ranges import ByteRanges
from common.transfer.writes import Writes


class GrpcTransferEngine:
    """Writes through the peer's own server, which checks every range against its grant before it copies.

    So a cancelled or failed write has stopped for certain as soon as the call has ended on our side, and the receiver
    refuses what is still under way once it takes its grant back.
    """

    name = "grpc"
    is_one_sided = False

    def __init__(
        self,
        memory: PoolMemory,
        channel_to: Callable[[str], grpc.aio.Channel],
        *,
        write_timeout_s: Callable[[int], float] = lambda num_bytes: 60.0,
    ) -> None:
        """`write_timeout_s` says how long a write of so many bytes may take."""
        # A peer needs the control address only, which it has.
        self.descriptor = EngineDescriptor(name=self.name)
        self._memory = memory
        self._channel_to = channel_to
        self._write_timeout_s = write_timeout_s
        self._writes = Writes()

    async def connect(
        self, address: str, descriptor: EngineDescriptor, *, timeout_s: float
    ) -> None:
        """Nothing to do: whoever knows the descriptor has spoken with the peer over the same channel."""

    def receive(self) -> Callable[[], None]:
        return lambda: None

    def write(self, target: WriteTarget, ranges: ByteRanges) -> TransferId:
        return self._writes.start(self._write(target, ranges))

    async def poll(self, transfer: TransferId, *, timeout_s: float) -> bool:
        return await self._writes.poll(transfer, timeout_s=timeout_s)

    async def cancel(self, transfer: TransferId, *, timeout_s: float) -> bool:
        return await self._writes.stop(transfer, timeout_s=timeout_s, interrupts=True)

    async def close(self) -> None:
        await self._writes.close()

    async def _write(self, target: WriteTarget, ranges: ByteRanges) -> None:
        expected = ranges.num_bytes
        arrived = await transfer_stream.send(
            self._channel_to(target.address),
            transfer_stream.pack(self._pieces(ranges)),
            peer=target.address,
            key=key_to_pb(target.key).SerializeToString(),
            capability=target.capability,
            timeout_s=self._write_timeout_s(expected),
        )
        if arrived != expected:
            raise TransferFailed(f"{target.address} took {arrived} of {expected} bytes")

    def _pieces(self, ranges: ByteRanges) -> Iterator[transfer_stream.Piece]:
        for r in ranges:
            for start in range(0, r.length, transfer_stream.MESSAGE_BYTES):
                length = min(transfer_stream.MESSAGE_BYTES, r.length - start)
                yield transfer_stream.Piece(
                    region=r.region,
                    offset=r.destination_offset + start,
                    payload=self._memory.read(r.region, r.source_offset + start, length),
                )
