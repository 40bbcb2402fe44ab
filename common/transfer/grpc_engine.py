"""The transfer engine that is always there: bytes over a gRPC stream. Knows ranges and channels; no rows."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence

import grpc.aio

from common.errors import TransferFailed
from common.rpc import transfer_stream
from common.transfer.convert import key_to_pb
from common.transfer.engine import TransferId, WriteTarget
from common.transfer.memory import PoolMemory
from common.transfer.plan import ByteRange


class GrpcTransferEngine:
    """Writes through the peer's own server, which checks every range against its grant before it copies.

    So a cancelled or failed write has stopped for certain as soon as the call has ended on our side, and the receiver
    refuses what is still under way once it takes its grant back.
    """

    name = "grpc"

    def __init__(
        self, channel_to: Callable[[str], grpc.aio.Channel], *, write_timeout_s: float = 60.0
    ) -> None:
        self._channel_to = channel_to
        self._write_timeout_s = write_timeout_s
        self._memory: PoolMemory | None = None
        self._ids = itertools.count(1)
        self._writes: dict[TransferId, asyncio.Task[None]] = {}

    def register(self, memory: PoolMemory) -> None:
        self._memory = memory

    def describe(self) -> bytes:
        # A peer needs the control address only, which it has.
        return b""

    def write(self, target: WriteTarget, ranges: Sequence[ByteRange]) -> TransferId:
        transfer = TransferId(next(self._ids))
        self._writes[transfer] = asyncio.create_task(self._write(target, ranges))
        return transfer

    async def poll(self, transfer: TransferId, *, timeout_s: float) -> bool:
        task = self._writes[transfer]
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            return False
        del self._writes[transfer]
        task.result()
        return True

    async def cancel(self, transfer: TransferId, *, timeout_s: float) -> bool:
        task = self._writes.get(transfer)
        if task is not None:
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=timeout_s)
            if not done:
                return False
            self._writes.pop(transfer, None)
        return True

    async def close(self) -> None:
        for transfer in list(self._writes):
            await self.cancel(transfer, timeout_s=self._write_timeout_s)

    async def _write(self, target: WriteTarget, ranges: Sequence[ByteRange]) -> None:
        arrived = await transfer_stream.send(
            self._channel_to(target.address),
            transfer_stream.pack(self._pieces(ranges)),
            peer=target.address,
            key=key_to_pb(target.key).SerializeToString(),
            capability=target.capability,
            timeout_s=self._write_timeout_s,
        )
        expected = sum(r.length for r in ranges)
        if arrived != expected:
            raise TransferFailed(f"{target.address} took {arrived} of {expected} bytes")

    def _pieces(self, ranges: Sequence[ByteRange]) -> Iterator[transfer_stream.Piece]:
        memory = self._memory
        assert memory is not None, "write before register"
        for r in ranges:
            for start in range(0, r.length, transfer_stream.MESSAGE_BYTES):
                length = min(transfer_stream.MESSAGE_BYTES, r.length - start)
                yield transfer_stream.Piece(
                    region=r.region,
                    offset=r.destination_offset + start,
                    payload=memory.read(r.region, r.source_offset + start, length),
                )
