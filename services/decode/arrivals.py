"""The receiver's digest of one hand-off, taken while rows arrive. Knows rows; never what a sender makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InvalidRequest
from common.transfer.digest import RowDigest
from common.transfer.manifest import ManifestEntry
from common.transfer.memory import PoolMemory
from common.transfer.plan import Placement, Rows, live_rows, rows_after


class Arrivals:
    """Rows are taken in once and in order, one call at a time; nothing may write them any more."""

    def __init__(self, memory: PoolMemory, destination: Placement, num_tokens: int) -> None:
        self._memory = memory
        self._destination = destination
        self._expected = live_rows(memory.layout, num_tokens, has_drafter_state=True)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Everything is sent once more."""
        self._digest = RowDigest(self._memory, self._destination)
        self._taken: Rows = tuple(range(rows.start, rows.start) for rows in self._expected)

    async def take(self, entries: Sequence[ManifestEntry]) -> None:
        """Digest rows that have arrived. Raises InvalidRequest when they do not follow those that were taken in before."""
        before, self._taken = self._taken, self._extended(entries)
        await self._digest.update_beside(rows_after(self._taken, before))
        if self._has_target_rows():
            self._digest.digests()  # now, and not while the sender waits

    async def finish(self, rows: Rows) -> tuple[bytes, ...]:
        """Digest what was not taken in of all `rows` that came; the digests of every region."""
        if rows != self._taken:
            await self._digest.update_beside(rows_after(rows, self._taken))
        return self._digest.digests()

    def _has_target_rows(self) -> bool:
        """All rows but the drafter's, which may never come; its region is the last."""
        num_regions = len(self._memory.layout.target.regions)
        return self._taken[:num_regions] == self._expected[:num_regions]

    def _extended(self, entries: Sequence[ManifestEntry]) -> Rows:
        names = [region.name for region in self._memory.layout.regions]
        taken = list(self._taken)
        for entry in entries:
            if entry.region not in names:
                raise InvalidRequest(
                    f"rows of {entry.region} were announced, which is not expected"
                )
            index = names.index(entry.region)
            rows, stop = taken[index], entry.first_row + entry.num_rows
            if entry.first_row != rows.stop or not rows.stop < stop <= self._expected[index].stop:
                raise InvalidRequest(
                    f"rows {entry.first_row} to {stop - 1} of {entry.region} were announced; "
                    f"{rows.stop} to {self._expected[index].stop - 1} are still to come"
                )
            taken[index] = range(rows.start, stop)
        return tuple(taken)
