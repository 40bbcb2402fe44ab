"""A digest over a request's rows that does not depend on how either side stores them."""

from __future__ import annotations

import xxhash

from common.transfer.memory import PoolMemory
from common.transfer.plan import Placement, Rows, segments


def digest_rows(memory: PoolMemory, placement: Placement, rows: Rows) -> bytes:
    """xxh3-128 over the bytes of `rows` in the order region, layer, position. Nothing may write them meanwhile."""
    digest = xxhash.xxh3_128()
    for index, region in enumerate(memory.layout.regions):
        pieces = list(segments(region, placement, index, rows[index]))
        described = memory.regions[index]
        for layer in range(len(region.layer_ids)):
            start = layer * described.layer_stride_bytes
            for piece in pieces:
                length = piece.num_rows * described.row_bytes
                digest.update(memory.read(index, start + piece.offset, length))
    return digest.digest()
