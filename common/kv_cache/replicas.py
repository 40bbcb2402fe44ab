"""Digests of a request's valid rows, for the claim that replicas of a cache are equal. Knows rows; no ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import xxhash

from common.kv_cache.layout import Region, Retention
from common.kv_cache.pool import CachePool


def row_digests(
    pool: CachePool, page_ids: Sequence[int], slot: int, num_tokens: int
) -> dict[str, int]:
    """By region, a 62-bit digest of the rows that continue a request of `num_tokens` computed positions."""
    digests = {}
    for region in pool.layout.regions:
        hasher = xxhash.xxh3_64()
        for rows in _live_bytes(pool, region, page_ids, slot, num_tokens):
            hasher.update(rows.numpy().data)
        digests[region.name] = _signed(hasher)
    return digests


def digests_by_row(
    pool: CachePool, region: Region, page_ids: Sequence[int], slot: int, num_tokens: int
) -> torch.Tensor:
    """The same for every row of a region by itself, `[layers, rows]`; slow, for telling where replicas differ."""
    return torch.tensor(
        [
            [_signed(xxhash.xxh3_64(row.numpy().data)) for row in rows]
            for rows in _live_bytes(pool, region, page_ids, slot, num_tokens)
        ]
    )


def _live_bytes(
    pool: CachePool, region: Region, page_ids: Sequence[int], slot: int, num_tokens: int
) -> Iterator[torch.Tensor]:
    """Each layer's live rows as bytes in host memory, `[rows, row bytes]`."""
    buffer = pool.buffers[region.name]
    size = buffer.rows_per_block
    rows = torch.arange(*_bounds(region.live_rows(num_tokens)))
    if region.retention is Retention.PAGED:
        index = torch.tensor(page_ids)[rows // size] * size + rows % size
    else:
        index = slot * size + rows % size
    for layer in range(buffer.tensor.shape[0]):
        chosen = buffer.layer_rows(layer)[index.to(buffer.tensor.device)]
        yield chosen.view(torch.uint8).cpu()


def _signed(hasher: xxhash.xxh3_64) -> int:
    return hasher.intdigest() >> 2  # fits an int64 with room to spare


def _bounds(rows: range) -> tuple[int, int]:
    return rows.start, max(rows.start, rows.stop)
