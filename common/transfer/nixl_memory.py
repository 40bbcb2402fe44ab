"""The regions of two pools as NIXL addresses them. Knows addresses and kinds of memory; asks NIXL for nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from common.transfer.ranges import ByteRanges

FEW_RANGES = 16
"""So many are described sooner one by one than by numpy, whose first calls cost some microseconds each."""

ADDRESSES = 1 << 64
"""Beyond them numpy begins anew, and so do we: a peer that says nonsense is refused by NIXL, which knows no such memory."""

Ends = npt.NDArray[np.uint64] | list[tuple[int, int, int]]
"""Address, length in bytes and device number of every range."""
Descriptors = tuple[Ends, str]
"""What NIXL takes for one end of a write: its ranges and their kind of memory."""


class NixlMemory:
    """Regions of a pool, on one device."""

    def __init__(self, region_addresses: Sequence[int], device: str) -> None:
        """`device` as torch writes it."""
        kind, _, number = device.partition(":")
        self.addresses = tuple(region_addresses)
        self.kind = "DRAM" if kind == "cpu" else "VRAM"
        self.device_number = 0 if kind == "cpu" else int(number or 0)


class NixlPair:
    """Our regions and a peer's, of which there are as many."""

    def __init__(self, ours: NixlMemory, theirs: NixlMemory) -> None:
        self._ours = ours
        self._theirs = theirs
        self._starts = np.array(
            [
                [(address, 0, each.device_number) for address in each.addresses]
                for each in (ours, theirs)
            ],
            dtype=np.uint64,
        )
        """`[2, regions, 3]`: a descriptor of no bytes where each region begins."""

    def descriptors(self, ranges: ByteRanges) -> tuple[Descriptors, Descriptors]:
        """(source, destination)."""
        is_few = len(ranges.table) <= FEW_RANGES
        source, destination = self._one_by_one(ranges) if is_few else self._at_once(ranges)
        return (source, self._ours.kind), (destination, self._theirs.kind)

    def _one_by_one(self, ranges: ByteRanges) -> tuple[Ends, Ends]:
        ours, our_device = self._ours.addresses, self._ours.device_number
        theirs, their_device = self._theirs.addresses, self._theirs.device_number
        rows = ranges.table.tolist()
        return (
            [(ours[region] + offset, length, our_device) for region, offset, _, length in rows],
            [
                ((theirs[region] + offset) % ADDRESSES, length, their_device)
                for region, _, offset, length in rows
            ],
        )

    def _at_once(self, ranges: ByteRanges) -> tuple[Ends, Ends]:
        ends = self._starts.take(ranges.regions, axis=1)
        addresses = ends[:, :, 0]
        addresses += ranges.offsets
        ends[:, :, 1] = ranges.lengths
        return ends[0], ends[1]


def host_bytes(address: int, length: int) -> Descriptors:
    """Descriptors of one range of host memory that belongs to no region."""
    return [(address, length, 0)], "DRAM"
