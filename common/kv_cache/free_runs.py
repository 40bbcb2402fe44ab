"""Free pages as runs of neighbours. Knows numbers only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator


class FreeRuns:
    """A set of pages that is cheap to take neighbours from: its cost grows with the number of runs, not of pages."""

    def __init__(self, num_pages: int) -> None:
        self._runs = [range(num_pages)] if num_pages else []
        """In order, never touching one another."""
        self._num_pages = num_pages

    def __len__(self) -> int:
        return self._num_pages

    def __iter__(self) -> Iterator[int]:
        return (page for run in self._runs for page in run)

    def add(self, page: int) -> None:
        """Put a page back and join it with its neighbours."""
        index = bisect_right(self._runs, page, key=lambda run: run.start)
        before = self._runs[index - 1] if index else range(0)
        after = self._runs[index] if index < len(self._runs) else range(0)
        assert page not in before, f"page {page} is free already"
        start, stop, first, last = page, page + 1, index, index
        if before and before.stop == page:
            start, first = before.start, index - 1
        if after and after.start == page + 1:
            stop, last = after.stop, index + 1
        self._runs[first:last] = [range(start, stop)]
        self._num_pages += 1

    def take(self, num_pages: int) -> list[int]:
        """Remove pages, in order: neighbours where a run is long enough, else as few runs as possible.

        Of the runs that fit, the shortest and then the lowest, so that long ones stay whole.
        """
        assert num_pages <= self._num_pages, f"{num_pages=} of {self._num_pages}"
        pages: list[int] = []
        while len(pages) < num_pages:
            pages += self._take_run(num_pages - len(pages))
        return sorted(pages)

    def _take_run(self, most: int) -> range:
        fitting = [run for run in self._runs if len(run) >= most]
        run = min(fitting, key=len) if fitting else max(self._runs, key=len)
        index = self._runs.index(run)
        taken, left = run[:most], run[most:]
        self._runs[index : index + 1] = [left] if left else []
        self._num_pages -= len(taken)
        return taken
