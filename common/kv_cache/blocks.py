"""Whole pages and rings of a request as bytes, between pools of the same layout and sizes. Knows memory; no requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from common.kv_cache.layout import Retention
from common.kv_cache.pool import CachePool, RegionBuffer


def num_block_bytes(pool: CachePool, page_ids: Sequence[int], slot: int) -> int:
    """Size of what `read_blocks` gives."""
    return sum(
        buffer.tensor[:, :1].numel() * buffer.tensor.element_size() * len(ids)
        for buffer, ids in _blocks(pool, page_ids, slot)
    )


def read_blocks(pool: CachePool, page_ids: Sequence[int], slot: int) -> torch.Tensor:
    """The bytes of these pages in every region and of the ring slot: one flat tensor on the host."""
    return torch.cat(
        [
            buffer.tensor[:, ids].reshape(-1).view(torch.uint8).cpu()
            for buffer, ids in _blocks(pool, page_ids, slot)
        ]
    )


def write_blocks(pool: CachePool, page_ids: Sequence[int], slot: int, data: torch.Tensor) -> None:
    """Overwrite the same blocks of another pool with what `read_blocks` gave."""
    offset = 0
    for buffer, ids in _blocks(pool, page_ids, slot):
        layers, _, rows, width = buffer.tensor.shape
        num_bytes = layers * len(ids) * rows * width * buffer.tensor.element_size()
        piece = data[offset : offset + num_bytes].clone().view(buffer.tensor.dtype)
        buffer.tensor[:, ids] = piece.view(layers, len(ids), rows, width).to(buffer.tensor.device)
        offset += num_bytes
    assert offset == len(data), f"{offset} of {len(data)} bytes belong to the blocks"


def _blocks(
    pool: CachePool, page_ids: Sequence[int], slot: int
) -> Iterator[tuple[RegionBuffer, list[int]]]:
    for region in pool.layout.regions:
        ids = list(page_ids) if region.retention is Retention.PAGED else [slot]
        if ids:
            yield pool.buffers[region.name], ids
