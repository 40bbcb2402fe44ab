"""One end of a measurement: memory, and the engines over it. Knows nothing of the other end."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from common.kv_cache.layout import CacheLayout, Region, Retention
from common.kv_cache.pool import CachePool
from common.rpc.channel import open_channel
from common.transfer.config import TransferConfig
from common.transfer.engine import TransferEngine
from common.transfer.engines import open_engines
from common.transfer.grpc_engine import GrpcTransferEngine
from common.transfer.memory import PoolMemory
from common.transfer.ranges import ByteRanges
from services.cli.transfer_bench.protocol import Opening

_REGION = Region(
    name="csa",
    layer_ids=(0,),
    ratio=1,
    row_width=128,
    dtype="float32",
    retention=Retention.PAGED,
)


class Endpoint:
    """A pool of cache pages as workers have it, at least as large as asked for, and what moves bytes out of it and
    into it."""

    def __init__(self, opening: Opening, *, host: str) -> None:
        """Open the engines that are named and can be had; `host` is where the other end reaches this one."""
        page_bytes = _REGION.rows_per_page * _REGION.row_width * 4
        self.num_pages = -(-opening.size_bytes // page_bytes)
        pool = CachePool(
            CacheLayout(regions=(_REGION,)),
            num_pages=self.num_pages,
            num_slots=1,
            max_step_rows=1,
            device=torch.device("cpu"),
        )
        self.memory = PoolMemory(pool)
        self.bytes: npt.NDArray[np.uint8] = (
            self.memory.tensors[0].view(-1).view(torch.uint8).numpy()
        )
        # Written once, so that no measurement pays for memory that the system had only promised.
        self.bytes.fill(1)
        self._channels: dict[str, grpc.aio.Channel] = {}
        grpc_engine = GrpcTransferEngine(self.memory, self._channel_to)
        self.engines: dict[str, TransferEngine] = {}
        self.missing: dict[str, str] = {}
        """Why a named engine is not here."""
        for name in opening.engines:
            config = TransferConfig.named(name).at(host)
            opened = open_engines(config, self.memory, grpc_engine)
            self.missing |= opened.missing
            if name in opened.by_name:
                self.engines[name] = opened.by_name[name]

    def digest_source(self, ranges: ByteRanges) -> str:
        """xxh3-128 over what is sent, in the sender's order."""
        return self._digest([(r.source_offset, r.length) for r in ranges])

    def digest_destination(self, ranges: ByteRanges) -> str:
        """xxh3-128 over what has arrived, in the sender's order."""
        return self._digest([(r.destination_offset, r.length) for r in ranges])

    async def close(self) -> None:
        for engine in self.engines.values():
            await engine.close()
        for channel in self._channels.values():
            await channel.close()

    def _digest(self, pieces: Sequence[tuple[int, int]]) -> str:
        hasher = xxhash.xxh3_128()
        for offset, length in pieces:
            hasher.update(self.memory.read(0, offset, length))
        return hasher.hexdigest()

    def _channel_to(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]
