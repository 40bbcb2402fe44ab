"""The room that requests occupy on a worker: pages and one ring slot each. Knows counts, no tensors.

Lives on the asyncio side of a worker, which is the only side that allocates: the engine thread is handed a slot and a
block table that stay fixed while it runs the request.
"""

from __future__ import annotations

from collections.abc import Collection

from common.errors import CapacityExhausted
from common.kv_cache.allocator import PageAllocator, PageCredit, SlotAllocator
from common.kv_cache.layout import num_pages_for


class Memory:
    """All pages and slots of a worker.

    A worker with several data parallel groups has them in equal, consecutive parts, one for each group; a request lives
    in one part.
    """

    def __init__(self, *, num_pages: int, num_slots: int, num_groups: int = 1) -> None:
        assert num_pages % num_groups == num_slots % num_groups == 0
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.num_groups = num_groups
        self._groups = [
            _Group(
                index=index,
                pages=PageAllocator(num_pages // num_groups),
                slots=SlotAllocator(num_slots // num_groups),
            )
            for index in range(num_groups)
        ]

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds and nobody has credit for."""
        return sum(group.pages.num_free for group in self._groups)

    @property
    def num_free_slots(self) -> int:
        return sum(group.slots.num_free for group in self._groups)

    @property
    def max_request_pages(self) -> int:
        """Pages of the largest request that fits an empty worker."""
        return self._groups[0].pages.num_pages

    def reserve(self, max_length: int) -> RequestMemory:
        """Set aside room for a request of `max_length` tokens. Raises CapacityExhausted; nothing is held then."""
        num_pages = num_pages_for(max_length)
        # Of those that fit, the one with the fewest requests; where none fits, any may say so.
        group = max(self._groups, key=lambda group: group.preference(num_pages))
        try:
            return group.reserve(num_pages)
        except CapacityExhausted as error:
            if self.num_groups == 1:
                raise
            raise CapacityExhausted(
                f"{error.message} in data parallel group {group.index} of {self.num_groups}; "
                "a request lives in one group",
                retry_after_s=error.retry_after_s,
            ) from None

    def would_fit(self, num_pages: int, group: int, *, without: Collection[RequestMemory]) -> bool:
        """Whether a group had room for a request of so many pages if these requests of the group were released."""
        part = self._groups[group]
        num_free_pages = part.pages.num_free + sum(memory.num_pages for memory in without)
        return num_free_pages >= num_pages and part.slots.num_free + len(without) > 0

    def check_integrity(self) -> None:
        for group in self._groups:
            group.pages.check_integrity()


class _Group:
    """One data parallel group's part."""

    def __init__(self, *, index: int, pages: PageAllocator, slots: SlotAllocator) -> None:
        self.index = index
        self.pages = pages
        self.slots = slots
        self.first_page = index * pages.num_pages
        self.first_slot = index * slots.num_slots

    def reserve(self, num_pages: int) -> RequestMemory:
        credit = self.pages.credit(num_pages)
        try:
            slot = self.slots.take()
        except CapacityExhausted:
            credit.close()
            raise
        return RequestMemory(self, slot, credit)

    def preference(self, num_pages: int) -> tuple[bool, int, int]:
        """The larger, the better it takes a request of this many pages."""
        slots, pages = self.slots.num_free, self.pages.num_free
        return (slots > 0 and pages >= num_pages, slots, pages)


class RequestMemory:
    """One request's room, named by the worker's pages and slots. `release` gives it back and may be called once."""

    def __init__(self, group: _Group, slot: int, credit: PageCredit) -> None:
        self._group = group
        self._slot = slot
        self._credit = credit
        self.group = group.index
        """The data parallel group that the request belongs to."""
        self.slot = group.first_slot + slot
        self.block_table: list[int] = []

    @property
    def num_pages(self) -> int:
        """Those that are free once this is released."""
        return len(self.block_table) + self._credit.num_left

    def take_all(self) -> list[int]:
        """Turn the whole credit into pages; returns the block table."""
        first = self._group.first_page
        self.block_table += [first + page for page in self._credit.take(self._credit.num_left)]
        return self.block_table

    def release(self) -> None:
        first = self._group.first_page
        self._credit.close()
        self._group.pages.release(page - first for page in self.block_table)
        self.block_table = []
        self._group.slots.release(self._slot)
