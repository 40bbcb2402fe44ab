"""A cache layout with every kind of region and tiny rows, and rows whose bytes say which row they are."""

from __future__ import annotations

import torch

from common.kv_cache.layout import CacheLayout, Region, Retention
from common.kv_cache.pool import CachePool
from common.transfer.memory import PoolMemory
from common.transfer.plan import Placement, Rows


def small_layout(*, dtype: str = "float32", window: int = 128) -> CacheLayout:
    """Region by region what the model has, with two layers and a few elements a row."""
    return CacheLayout(
        regions=(
            _ring("window", (0, 1, 2), dtype, window),
            _paged("csa", (1, 2), 4, dtype),
            _paged("index", (1, 2), 4, dtype),
            _ring("csa_tail", (1, 2), "float32", 8, tail_group=4),
            _ring("index_tail", (1, 2), "float32", 8, tail_group=4),
            _paged("hca", (0,), 128, dtype),
            _ring("hca_tail", (0,), "float32", 128, tail_group=128),
            _ring("drafter", (0, 1, 2), dtype, window),
        )
    )


def small_pool(
    layout: CacheLayout, *, num_pages: int = 12, num_slots: int = 4, draft_length: int = 5
) -> CachePool:
    return CachePool(
        layout,
        num_pages=num_pages,
        num_slots=num_slots,
        max_step_rows=draft_length + 1,
        device=torch.device("cpu"),
    )


def row_bytes(region: int, layer: int, row: int, length: int, *, salt: int) -> bytes:
    """What a row holds in these tests: no two rows of a request are alike, nor the same row of two requests."""
    return bytes(
        (salt + 7 * region + 31 * layer + 13 * row + row // 97 + i * (1 + row % 5)) % 251
        for i in range(length)
    )


def write_rows(memory: PoolMemory, placement: Placement, rows: Rows, *, salt: int) -> None:
    """Store recognisable rows, one by one and by arithmetic of our own: this is what the plan is tested against."""
    for index, region in enumerate(memory.layout.regions):
        described = placement.memory[index]
        for layer in range(len(region.layer_ids)):
            for row in rows[index]:
                payload = row_bytes(index, layer, row, described.row_bytes, salt=salt)
                memory.write(
                    index, row_offset(memory, placement, index, layer, row), memoryview(payload)
                )


def read_rows(
    memory: PoolMemory, placement: Placement, rows: Rows
) -> list[tuple[int, int, int, bytes]]:
    """(region, layer, row, bytes) of every row."""
    found = []
    for index, region in enumerate(memory.layout.regions):
        length = placement.memory[index].row_bytes
        for layer in range(len(region.layer_ids)):
            for row in rows[index]:
                offset = row_offset(memory, placement, index, layer, row)
                found.append((index, layer, row, bytes(memory.read(index, offset, length))))
    return found


def expected_rows(
    memory: PoolMemory, rows: Rows, *, salt: int
) -> list[tuple[int, int, int, bytes]]:
    """What `read_rows` gives when everything is where it belongs."""
    return [
        (
            index,
            layer,
            row,
            row_bytes(index, layer, row, memory.regions[index].row_bytes, salt=salt),
        )
        for index, region in enumerate(memory.layout.regions)
        for layer in range(len(region.layer_ids))
        for row in rows[index]
    ]


def row_offset(memory: PoolMemory, placement: Placement, index: int, layer: int, row: int) -> int:
    region = memory.layout.regions[index]
    described = placement.memory[index]
    if region.retention is Retention.PAGED:
        block = placement.page_ids[row * region.ratio // 128]
        inside = row % (128 // region.ratio)
    else:
        block, inside = placement.slot, row % described.rows_per_block
    return (
        layer * described.layer_stride_bytes
        + block * described.block_stride_bytes
        + inside * described.row_bytes
    )


def _ring(
    name: str, layers: tuple[int, ...], dtype: str, window_rows: int, tail_group: int = 0
) -> Region:
    return Region(
        name=name,
        layer_ids=layers,
        ratio=1,
        row_width=3,
        dtype=dtype,
        retention=Retention.RING,
        window_rows=window_rows,
        tail_group=tail_group,
    )


def _paged(name: str, layers: tuple[int, ...], ratio: int, dtype: str) -> Region:
    return Region(
        name=name,
        layer_ids=layers,
        ratio=ratio,
        row_width=4,
        dtype=dtype,
        retention=Retention.PAGED,
    )
