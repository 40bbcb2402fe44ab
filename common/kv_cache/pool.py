"""The memory of the cache: one buffer per region. Knows shapes and strides; never who holds what."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch

from common.kv_cache.layout import DRAFTER_REGION, CacheLayout, Region, Retention

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionBuffer:
    """One region's memory, `[layers, blocks, rows, width]`; a block is a page or a request's ring."""

    region: Region
    tensor: torch.Tensor
    rows_per_block: int

    @property
    def row_bytes(self) -> int:
        return self.region.row_width * self.tensor.element_size()

    def scrub(self, block: int, kept: range) -> None:
        """Zero all rows of a ring but those of the `kept` positions."""
        if not len(kept):
            self.tensor[:, block].zero_()
            return
        stale = torch.ones(self.rows_per_block, dtype=torch.bool)
        stale[torch.arange(kept.start, kept.stop) % self.rows_per_block] = False
        self.tensor[:, block, stale.nonzero().squeeze(1).to(self.tensor.device)] = 0

    def layer_rows(self, layer_index: int) -> torch.Tensor:
        """All rows of a layer, `[blocks * rows, width]`, as a view."""
        return self.tensor[layer_index].view(-1, self.region.row_width)


class CachePool:
    """Buffers of all regions, allocated once: rings first, so that pages never take what they need.

    `max_step_rows` is the widest step that may be rolled back: draft length + 1.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_pages: int,
        num_slots: int,
        max_step_rows: int,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.max_step_rows = max_step_rows
        self.device = device
        pages_last = sorted(layout.regions, key=lambda r: r.retention is Retention.PAGED)
        allocated = {region.name: self._allocate(region) for region in pages_last}
        self.buffers = {region.name: allocated[region.name] for region in layout.regions}

    def _allocate(self, region: Region) -> RegionBuffer:
        if region.retention is Retention.PAGED:
            num_blocks, rows = self.num_pages, region.rows_per_page
        else:
            num_blocks, rows = self.num_slots, region.ring_rows(self.max_step_rows)
        shape = (len(region.layer_ids), num_blocks, rows, region.row_width)
        tensor = torch.zeros(shape, dtype=_DTYPES[region.dtype], device=self.device)
        return RegionBuffer(region=region, tensor=tensor, rows_per_block=rows)

    def part(self, index: int, num_parts: int) -> CachePool:
        """An equal part of the pages and slots, which shares this pool's memory and counts from 0."""
        part = copy.copy(self)
        part.num_pages = self.num_pages // num_parts
        part.num_slots = self.num_slots // num_parts
        part.buffers = {
            name: replace(buffer, tensor=buffer.tensor.chunk(num_parts, dim=1)[index])
            for name, buffer in self.buffers.items()
        }
        return part

    def shares_memory_with(self, other: CachePool) -> bool:
        """Whether what is written to one is there for the other, as between a whole and its part."""
        return any(
            buffer.tensor.untyped_storage().data_ptr()
            == other.buffers[name].tensor.untyped_storage().data_ptr()
            for name, buffer in self.buffers.items()
        )

    def scrub(self, slot: int, num_tokens: int, *, drafter_from: int = 0) -> None:
        """Zero what earlier owners left in a slot's rings.

        Rows stay that continue a request with `num_tokens` computed positions; the drafter's count from `drafter_from`.
        """
        for region in self.layout.regions:
            if region.retention is Retention.PAGED:
                continue
            live = region.live_rows(num_tokens)
            first = max(live.start, drafter_from) if region.name == DRAFTER_REGION else live.start
            self.buffers[region.name].scrub(slot, range(first, live.stop))

    @property
    def num_bytes(self) -> int:
        return sum(b.tensor.numel() * b.tensor.element_size() for b in self.buffers.values())
