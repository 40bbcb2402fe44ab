"""Digests over a request's rows that do not depend on how either side stores them."""

from __future__ import annotations

import asyncio
from typing import Protocol

import xxhash

from common.transfer.memory import PoolMemory
from common.transfer.plan import Placement, Rows, segments

INLINE_BYTES = 1024 * 1024
"""Hashed in a tenth of a millisecond."""


class _Hasher(Protocol):
    def update(self, piece: memoryview, /) -> None: ...
    def digest(self) -> bytes: ...


class RowDigest:
    """Digests of a request's regions, taken while its rows become final: whole pages early, the rest in the end.

    One stream per layer, because rows of all layers close together and a hash wants them one after the other.
    """

    def __init__(self, memory: PoolMemory, placement: Placement) -> None:
        self._memory = memory
        self._placement = placement
        self._layers: list[list[_Hasher]] = [
            [xxhash.xxh3_128() for _ in region.layer_ids] for region in memory.layout.regions
        ]
        self._digests: list[bytes | None] = [None] * len(self._layers)
        """None where rows were taken in since."""

    def update(self, rows: Rows) -> None:
        """Take in rows that follow those of earlier calls. Nothing may write them meanwhile."""
        for index, region in enumerate(self._memory.layout.regions):
            if not rows[index]:
                continue
            self._digests[index] = None
            described = self._memory.regions[index]
            pieces = [
                (piece.offset, piece.num_rows * described.row_bytes)
                for piece in segments(region, self._placement, index, rows[index])
            ]
            for layer, hasher in enumerate(self._layers[index]):
                start = layer * described.layer_stride_bytes
                for offset, length in pieces:
                    hasher.update(self._memory.read(index, start + offset, length))

    async def update_beside(self, rows: Rows) -> None:
        """As `update`, and on another thread when that takes longer than a thread needs to begin."""
        if rows_bytes(self._memory, rows) <= INLINE_BYTES:
            self.update(rows)
        else:
            await asyncio.to_thread(self.update, rows)

    def digests(self) -> tuple[bytes, ...]:
        """For every region: xxh3-128 over the layers' xxh3-128, in layout order. Asked for again, it costs nothing."""
        return tuple(self._region(index) for index in range(len(self._layers)))

    def _region(self, index: int) -> bytes:
        digest = self._digests[index]
        if digest is None:
            of_layers = b"".join(hasher.digest() for hasher in self._layers[index])
            digest = self._digests[index] = xxhash.xxh3_128(of_layers).digest()
        return digest


def rows_bytes(memory: PoolMemory, rows: Rows) -> int:
    """Bytes of rows, over all layers."""
    return sum(
        len(each) * len(region.layer_ids) * described.row_bytes
        for each, region, described in zip(rows, memory.layout.regions, memory.regions, strict=True)
    )


def digest_rows(memory: PoolMemory, placement: Placement, rows: Rows) -> tuple[bytes, ...]:
    """The digests of all regions at once. Nothing may write the rows meanwhile."""
    digest = RowDigest(memory, placement)
    digest.update(rows)
    return digest.digests()
