"""Who holds which page and which ring slot. Knows numbers only; never touches cache memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from common.errors import CapacityExhausted
from common.kv_cache.free_runs import FreeRuns


class PageAllocator:
    """Reference-counted pages, with credits that set pages aside before they are taken.

    Neighbours are handed out together where that is possible: what lies side by side moves as one range.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = FreeRuns(num_pages)
        self._references: dict[int, int] = {}
        self._num_credited = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds and nobody has credit for."""
        return len(self._free) - self._num_credited

    def credit(self, num_pages: int) -> PageCredit:
        """Set pages aside. Raises CapacityExhausted when fewer are free."""
        if num_pages > self.num_free:
            raise CapacityExhausted(
                f"{num_pages} pages are needed and {self.num_free} of {self.num_pages} are free",
                retry_after_s=1.0,
            )
        self._num_credited += num_pages
        return PageCredit(self, num_pages)

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that somebody holds already."""
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Give up one hold on each page; a page without holders is free."""
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                del self._references[page]
                self._free.add(page)

    def check_integrity(self) -> None:
        held, free = set(self._references), set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not held & free, f"pages {held & free} are held and free"
        assert len(held) + len(free) == self.num_pages, (
            f"{len(held)=} {len(free)=} {self.num_pages=}"
        )
        assert 0 <= self._num_credited <= len(free), f"{self._num_credited=} {len(free)=}"

    def _take(self, num_pages: int) -> list[int]:
        pages = self._free.take(num_pages)
        self._num_credited -= num_pages
        for page in pages:
            self._references[page] = 1
        return pages

    def _return_credit(self, num_pages: int) -> None:
        self._num_credited -= num_pages


class PageCredit:
    """Pages that one request may still take. `close` gives back what was not taken."""

    def __init__(self, allocator: PageAllocator, num_pages: int) -> None:
        self._allocator = allocator
        self.num_left = num_pages

    def take(self, num_pages: int) -> list[int]:
        """Turn credit into pages, held once by the caller."""
        assert num_pages <= self.num_left, f"{num_pages=} {self.num_left=}"
        self.num_left -= num_pages
        return self._allocator._take(num_pages)

    def close(self) -> None:
        self._allocator._return_credit(self.num_left)
        self.num_left = 0


class SlotAllocator:
    """Ring slots, one a request."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Raises CapacityExhausted when no slot is free."""
        if not self._free:
            raise CapacityExhausted(
                f"all {self.num_slots} request slots are taken", retry_after_s=1.0
            )
        return heapq.heappop(self._free)

    def release(self, slot: int) -> None:
        assert slot not in self._free, f"slot {slot} is free already"
        heapq.heappush(self._free, slot)
