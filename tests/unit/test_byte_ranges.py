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
    for part in (slice(1, 3), slice(-2, None), slice(None, None, -2), slice(5, None)):
        assert list(ranges[part]) == listed[part]
    assert all(type(number) is int for each in (*ranges, ranges[1]) for number in each)
    with pytest.raises(IndexError):
        ranges[5]
    assert (ranges.num_bytes, ranges[1:3].num_bytes) == (1 + 2 + 3 + 4 + 5, 2 + 3)


def test_no_ranges_are_nothing_to_write() -> None:
    ranges = ByteRanges.of([])
    assert not ranges
    assert list(ranges) == list(ranges[:]) == []
    assert ranges.num_bytes == 0


def test_a_region_may_have_more_bytes_than_a_signed_number_counts() -> None:
    far = ByteRange(region=1, source_offset=1 << 63, destination_offset=5, length=1 << 63)
    ranges = ByteRanges.of([far, far])
    assert list(ranges) == [far, far]
    assert ranges.num_bytes == 1 << 64


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


@pytest.mark.parametrize("count", [1, FEW_RANGES + 1])
def test_a_peer_that_begins_nowhere_has_addresses_that_nixl_can_be_told(count: int) -> None:
    """NIXL refuses them then, as any that were not registered; a greater number would not even reach it."""
    pair = NixlPair(NixlMemory((0,), "cpu"), NixlMemory(((1 << 64) - 1,), "cpu"))
    one = ByteRange(region=0, source_offset=0, destination_offset=5, length=1)
    _, (destination, _) = pair.descriptors(ByteRanges.of([one] * count))
    assert np.array_equal(destination, [(4, 1, 0)] * count)
