"""Ranges of a write as one table, and as NIXL addresses them."""

from __future__ import annotations

import numpy as np
import pytest

from common.transfer.nixl_memory import FEW_RANGES, NixlMemory, NixlPair
from common.transfer.ranges import ByteRange, ByteRanges

OURS, THEIRS = (1 << 40, 5 << 40, 9 << 40), (2 << 40, 3 << 40, 4 << 40)


def some_ranges(count: int) -> list[ByteRange]:
    return [
        ByteRange(region=n % 3, source_offset=n * 100, destination_offset=n * 70, length=n + 1)
        for n in range(count)
    ]


def test_a_table_of_ranges_is_read_as_the_list_that_it_was_made_of() -> None:
    listed = some_ranges(5)
    ranges = ByteRanges.of(listed)
    assert list(ranges) == listed
    assert (len(ranges), ranges[0], ranges[-1]) == (5, listed[0], listed[4])
    assert list(ranges[1:3]) == listed[1:3]
    assert (ranges.num_bytes, ranges[1:3].num_bytes) == (1 + 2 + 3 + 4 + 5, 2 + 3)


def test_no_ranges_are_nothing_to_write() -> None:
    ranges = ByteRanges.of([])
    assert not ranges
    assert ranges.num_bytes == 0


@pytest.mark.parametrize("count", [1, FEW_RANGES, FEW_RANGES + 1, 300])
@pytest.mark.parametrize(("device", "number"), [("cuda:3", 3), ("cuda", 0), ("cpu", 0)])
def test_nixl_is_told_the_same_however_many_ranges_there_are(
    count: int, device: str, number: int
) -> None:
    pair = NixlPair(NixlMemory(OURS, "cpu"), NixlMemory(THEIRS, device))
    listed = some_ranges(count)

    (source, our_kind), (destination, their_kind) = pair.descriptors(ByteRanges.of(listed))

    assert (our_kind, their_kind) == ("DRAM", "DRAM" if device == "cpu" else "VRAM")
    assert np.array_equal(source, [(OURS[r.region] + r.source_offset, r.length, 0) for r in listed])
    assert np.array_equal(
        destination,
        [(THEIRS[r.region] + r.destination_offset, r.length, number) for r in listed],
    )
