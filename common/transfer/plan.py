"""Which bytes go where when rows move between two processes. Knows rows and offsets; never touches memory.

Rows are addressed by position on both sides. Where a position lies is each side's own affair: a page or a ring slot of
whatever size, so page counts, ring sizes and draft lengths may differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.kv_cache.layout import DRAFTER_REGION, CacheLayout, Region, Retention
from common.transfer.ranges import ByteRanges

Rows = tuple[range, ...]
"""Rows of every region, in layout order; an empty range where a region has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionMemory:
    """How one side stores a region: `[layers, blocks, rows, width]`, a block being a page or a request's ring."""

    name: str
    total_bytes: int
    layer_stride_bytes: int
    block_stride_bytes: int
    rows_per_block: int
    row_bytes: int

    @property
    def has_adjacent_blocks(self) -> bool:
        """Nothing lies between two blocks of a layer."""
        return self.block_stride_bytes == self.rows_per_block * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one request's rows are on one side."""

    memory: tuple[RegionMemory, ...]
    """In layout order."""
    page_ids: tuple[int, ...]
    """In position order."""
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive rows that are also consecutive in memory, as many as there are."""

    num_rows: int
    offset: int
    """Bytes from the start of a layer."""


def live_rows(layout: CacheLayout, num_tokens: int, *, has_drafter_state: bool) -> Rows:
    """All rows that continue a request whose first `num_tokens` positions are computed."""
    return tuple(
        region.live_rows(num_tokens)
        if has_drafter_state or region.name != DRAFTER_REGION
        else range(0)
        for region in layout.regions
    )


def final_rows(
    layout: CacheLayout, num_tokens: int, num_computed: int, *, has_drafter_state: bool
) -> Rows:
    """Of all rows that continue a request of `num_tokens` positions, those that may travel once `num_computed` are computed.

    Of paged regions whole pages, so that what travels together lies together.
    """
    every = live_rows(layout, num_tokens, has_drafter_state=has_drafter_state)
    if num_computed >= num_tokens:
        return every
    return tuple(
        region.closed_rows(num_computed)
        if region.retention is Retention.PAGED
        else range(rows.start, max(rows.start, min(rows.stop, num_computed)))
        for region, rows in zip(layout.regions, every, strict=True)
    )


def rows_after(rows: Rows, sent: Rows) -> Rows:
    """What is left of `rows` when the leading rows `sent` are gone already."""
    return tuple(
        range(max(every.start, gone.stop), every.stop)
        for every, gone in zip(rows, sent, strict=True)
    )


def plan_writes(
    layout: CacheLayout, source: Placement, destination: Placement, rows: Rows
) -> ByteRanges:
    """The copies that move `rows` of every layer; neighbours on both sides are one range."""
    numbers = array("Q")
    for index, region in enumerate(layout.regions):
        if not rows[index]:
            continue  # the peer need not even have the drafter's region
        ours, theirs = source.memory[index], destination.memory[index]
        copies = _in_step(
            segments(region, source, index, rows[index]),
            segments(region, destination, index, rows[index]),
            ours.row_bytes,
        )
        strides = ours.layer_stride_bytes, theirs.layer_stride_bytes
        _append(numbers, index, list(copies), len(region.layer_ids), strides)
    return ByteRanges(numbers)


def segments(region: Region, placement: Placement, index: int, rows: range) -> Iterator[Segment]:
    """The pieces of memory that hold `rows` of one layer, in row order; `index` is the region's in the layout."""
    memory = placement.memory[index]
    size = memory.rows_per_block
    is_paged = region.retention is Retention.PAGED
    first = rows.start
    while first < rows.stop:
        end = first - first % size + size
        block = placement.page_ids[first // size] if is_paged else placement.slot
        if is_paged and memory.has_adjacent_blocks:
            # A run of pages is one piece at once: most of a request's pages are, and there may be hundreds.
            next_block = block + 1
            while end < rows.stop and placement.page_ids[end // size] == next_block:
                end, next_block = end + size, next_block + 1
        end = min(end, rows.stop)
        yield Segment(
            num_rows=end - first,
            offset=block * memory.block_stride_bytes + first % size * memory.row_bytes,
        )
        first = end


def _in_step(
    source: Iterator[Segment], destination: Iterator[Segment], row_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Walk both sides' segments of the same rows together: (source offset, destination offset, length)."""
    ours, theirs = next(source, None), next(destination, None)
    while ours is not None and theirs is not None:
        num_rows = min(ours.num_rows, theirs.num_rows)
        yield ours.offset, theirs.offset, num_rows * row_bytes
        ours = _advance(ours, num_rows, row_bytes) or next(source, None)
        theirs = _advance(theirs, num_rows, row_bytes) or next(destination, None)


def _advance(segment: Segment, num_rows: int, row_bytes: int) -> Segment | None:
    if num_rows == segment.num_rows:
        return None
    return Segment(
        num_rows=segment.num_rows - num_rows, offset=segment.offset + num_rows * row_bytes
    )


def _append(
    numbers: array[int],
    region: int,
    copies: Sequence[tuple[int, int, int]],
    num_layers: int,
    strides: tuple[int, int],
) -> None:
    """The same (source offset, destination offset, length) in every layer of a region."""
    source_end = destination_end = -1
    for layer in range(num_layers):
        for source_offset, destination_offset, length in copies:
            source = source_offset + layer * strides[0]
            destination = destination_offset + layer * strides[1]
            if (source, destination) == (source_end, destination_end):
                numbers[-1] += length
            else:
                numbers.extend((region, source, destination, length))
            source_end, destination_end = source + length, destination + length
