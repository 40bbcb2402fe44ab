"""What one hand-off may write. Knows blocks and offsets; never touches memory."""

from __future__ import annotations

from common.errors import InvalidRequest
from common.kv_cache.layout import CacheLayout, Retention
from common.transfer.plan import Placement


class WriteGrant:
    """Leave to overwrite the pages and the ring slot of one reservation, and nothing else."""

    def __init__(self, layout: CacheLayout, placement: Placement) -> None:
        self._memory = placement.memory
        pages, slots = frozenset(placement.page_ids), frozenset([placement.slot])
        self._blocks = [
            pages if region.retention is Retention.PAGED else slots for region in layout.regions
        ]

    def require(self, region: int, offset: int, length: int) -> None:
        """Raise InvalidRequest, naming region, range and block, unless every byte lies in granted blocks."""
        if not 0 <= region < len(self._memory):
            raise _refused(
                f"write to region {region}; the contract has regions 0 to {len(self._memory) - 1}"
            )
        memory = self._memory[region]
        end = offset + length
        if offset < 0 or length < 0 or end > memory.total_bytes:
            raise _refused(
                f"write of {length} bytes at {offset} of region {memory.name}, which has {memory.total_bytes}"
            )
        while offset < end:
            layer, inside = divmod(offset, memory.layer_stride_bytes)
            block = inside // memory.block_stride_bytes
            if block not in self._blocks[region]:
                raise _refused(
                    f"write of {length} bytes at {end - length} of region {memory.name} touches block {block}, "
                    "which this hand-off was not granted"
                )
            offset = layer * memory.layer_stride_bytes + (block + 1) * memory.block_stride_bytes


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, metadata={"field": "write"})
