"""A cache pool as bytes. Knows offsets and tensors; never who holds what."""

from __future__ import annotations

import numpy as np
import torch

from common.kv_cache.pool import CachePool, RegionBuffer
from common.transfer.plan import Placement, RegionMemory


class PoolMemory:
    """Byte access to the regions of a pool, by region index and offset. The pool stays the owner."""

    def __init__(self, pool: CachePool) -> None:
        self.pool = pool
        self.layout = pool.layout
        self._buffers = [pool.buffers[region.name] for region in pool.layout.regions]
        self.tensors = tuple(b.tensor for b in self._buffers)
        """The regions' buffers whole, in layout order."""
        self._bytes = [tensor.view(-1).view(torch.uint8) for tensor in self.tensors]
        # A slice of a view costs a tenth of a slice of a tensor, and a digest takes thousands.
        self._views = [
            each.numpy().data if each.device.type == "cpu" else None for each in self._bytes
        ]
        self.regions = tuple(_describe(buffer) for buffer in self._buffers)

    def placement(self, *, page_ids: tuple[int, ...], slot: int) -> Placement:
        """Where a request with these pages and this slot lives here."""
        return Placement(memory=self.regions, page_ids=page_ids, slot=slot)

    def read(self, region: int, offset: int, length: int) -> memoryview:
        """The bytes as they are now: a view where the pool is in host memory, a copy where it is not."""
        view = self._views[region]
        if view is not None:
            return view[offset : offset + length]
        return self._bytes[region][offset : offset + length].cpu().numpy().data

    def write(self, region: int, offset: int, payload: memoryview) -> None:
        """Overwrite bytes. The caller has checked that they are its own to overwrite."""
        target = self._bytes[region][offset : offset + len(payload)]
        if target.device.type == "cpu":
            target.numpy()[:] = np.frombuffer(payload, np.uint8)
        else:
            target.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))


def _describe(buffer: RegionBuffer) -> RegionMemory:
    tensor = buffer.tensor
    size = tensor.element_size()
    return RegionMemory(
        name=buffer.region.name,
        total_bytes=tensor.numel() * size,
        layer_stride_bytes=tensor.stride(0) * size,
        block_stride_bytes=tensor.stride(1) * size,
        rows_per_block=buffer.rows_per_block,
        row_bytes=buffer.row_bytes,
    )
