"""The memory of the cache: one buffer per region. Knows shapes and strides; never who holds what."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.kv_cache.layout import CacheLayout, Region, Retention

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

    def layer_rows(self, layer_index: int) -> torch.Tensor:
        """All rows of a layer, `[blocks * rows, width]`, as a view."""
        return self.tensor[layer_index].view(-1, self.region.row_width)


class CachePool:
    """Buffers of all regions, allocated once.

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
        self.buffers = {region.name: self._allocate(region) for region in layout.regions}

    def _allocate(self, region: Region) -> RegionBuffer:
        if region.retention is Retention.PAGED:
            num_blocks, rows = self.num_pages, region.rows_per_page
        else:
            num_blocks, rows = self.num_slots, region.ring_rows(self.max_step_rows)
        shape = (len(region.layer_ids), num_blocks, rows, region.row_width)
        tensor = torch.zeros(shape, dtype=_DTYPES[region.dtype], device=self.device)
        return RegionBuffer(region=region, tensor=tensor, rows_per_block=rows)

    @property
    def num_bytes(self) -> int:
        return sum(b.tensor.numel() * b.tensor.element_size() for b in self.buffers.values())
