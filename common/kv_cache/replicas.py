"""A digest of a request's valid rows, for the claim that replicas of a cache are equal. Knows rows; no ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from common.kv_cache.layout import Retention
from common.kv_cache.pool import CachePool


def row_digests(
    pool: CachePool, page_ids: Sequence[int], slot: int, num_tokens: int
) -> dict[str, int]:
    """By region, a 62-bit digest of the rows that continue a request of `num_tokens` computed positions."""
    digests = {}
    for region in pool.layout.regions:
        buffer = pool.buffers[region.name]
        rows = torch.arange(*_bounds(region.live_rows(num_tokens)))
        if region.retention is Retention.PAGED:
            table = torch.tensor(page_ids)
            size = buffer.rows_per_block
            index = table[rows // size] * size + rows % size
        else:
            index = slot * buffer.rows_per_block + rows % buffer.rows_per_block
        hasher = xxhash.xxh3_64()
        for layer in range(buffer.tensor.shape[0]):
            chosen = buffer.layer_rows(layer)[index.to(buffer.tensor.device)]
            hasher.update(chosen.reshape(-1).view(torch.uint8).cpu().numpy().data)
        digests[region.name] = hasher.intdigest() >> 2  # fits an int64 with room to spare
    return digests


def _bounds(rows: range) -> tuple[int, int]:
    return rows.start, max(rows.start, rows.stop)
