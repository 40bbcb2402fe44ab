"""The room that requests occupy on a worker: pages and one ring slot each. Knows counts, no tensors.

Lives on the asyncio side of a worker, which is the only side that allocates: the engine thread is handed a slot and a
block table that stay fixed while it runs the request.
"""

from __future__ import annotations

from common.errors import CapacityExhausted
from common.kv_cache.allocator import PageAllocator, PageCredit, SlotAllocator
from common.kv_cache.layout import num_pages_for


class Memory:
    """All pages and slots of a worker."""

    def __init__(self, *, num_pages: int, num_slots: int) -> None:
        self.pages = PageAllocator(num_pages)
        self.slots = SlotAllocator(num_slots)

    def reserve(self, max_length: int) -> RequestMemory:
        """Set aside room for a request of `max_length` tokens. Raises CapacityExhausted; nothing is held then."""
        credit = self.pages.credit(num_pages_for(max_length))
        try:
            slot = self.slots.take()
        except CapacityExhausted:
            credit.close()
            raise
        return RequestMemory(self, slot, credit)

    def check_integrity(self) -> None:
        self.pages.check_integrity()


class RequestMemory:
    """One request's room. `release` gives everything back and may be called once."""

    def __init__(self, memory: Memory, slot: int, credit: PageCredit) -> None:
        self._memory = memory
        self._credit = credit
        self.slot = slot
        self.block_table: list[int] = []

    def take_all(self) -> list[int]:
        """Turn the whole credit into pages; returns the block table."""
        self.block_table += self._credit.take(self._credit.num_left)
        return self.block_table

    def release(self) -> None:
        self._credit.close()
        self._memory.pages.release(self.block_table)
        self.block_table = []
        self._memory.slots.release(self.slot)
