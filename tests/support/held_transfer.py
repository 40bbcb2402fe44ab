"""A write by gRPC that stands still in its middle. Knows the prefill worker's engine; not who gives the write up."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from common.transfer.engine import WriteTarget
from common.transfer.ranges import ByteRanges
from tests.support.handoff_cluster import Cluster


class HeldTransfer:
    """Lets half of the first write through and holds the rest until released."""

    def __init__(self, it: Cluster) -> None:
        self.is_half_way = asyncio.Event()
        self.release = asyncio.Event()
        self._engine = cast(Any, it.prefill.pairs.engines.by_name["grpc"])
        self._write = self._engine._write
        self._engine._write = self._half

    async def _half(self, target: WriteTarget, ranges: ByteRanges) -> None:
        half = len(ranges) // 2
        await self._write(target, ranges[:half])
        self.is_half_way.set()
        await self.release.wait()
        await self._write(target, ranges[half:])

    def restore(self) -> None:
        self._engine._write = self._write
        self.release.set()
