"""Which bytes move: checked by moving them and looking at every row."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import xxhash

from common.transfer.digest import RowDigest, digest_rows
from common.transfer.memory import PoolMemory
from common.transfer.plan import (
    Placement,
    Rows,
    final_rows,
    live_rows,
    plan_writes,
    rows_after,
)
from common.transfer.ranges import ByteRange
from tests.support.small_cache import (
    expected_rows,
    read_rows,
    row_offset,
    small_layout,
    small_pool,
    write_rows,
)

LENGTHS = (1, 3, 4, 5, 7, 8, 127, 128, 129, 131, 255, 256, 257, 300, 513)
DRAFT_LENGTHS = (1, 5, 7, 15)


def memory_with(draft_length: int, *, num_pages: int = 12, dtype: str = "float32") -> PoolMemory:
    layout = small_layout(dtype=dtype)
    return PoolMemory(small_pool(layout, num_pages=num_pages, draft_length=draft_length))


def whole_pages(memory: PoolMemory, num_tokens: int) -> Rows:
    return tuple(region.closed_rows(num_tokens) for region in memory.layout.regions)


def copy(source: PoolMemory, destination: PoolMemory, ranges: Iterable[ByteRange]) -> None:
    for r in ranges:
        piece = source.read(r.region, r.source_offset, r.length)
        destination.write(r.region, r.destination_offset, memoryview(bytes(piece)))


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("drafts", [(1, 15), (5, 7), (7, 5), (15, 1)])
def test_every_live_row_arrives_whatever_the_rings_and_pages_of_both_sides(
    num_tokens: int, drafts: tuple[int, int]
) -> None:
    source, destination = memory_with(drafts[0]), memory_with(drafts[1], num_pages=9)
    ours = source.placement(page_ids=(3, 4, 5, 9, 1), slot=2)
    theirs = destination.placement(page_ids=(7, 6, 2, 3, 4), slot=1)
    rows = live_rows(source.layout, num_tokens, has_drafter_state=True)
    write_rows(source, ours, rows, salt=num_tokens)

    copy(source, destination, plan_writes(source.layout, ours, theirs, rows))

    assert read_rows(destination, theirs, rows) == expected_rows(source, rows, salt=num_tokens)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_rows_that_are_final_early_and_the_rest_later_are_everything_and_nothing_twice(
    num_tokens: int,
) -> None:
    source, destination = memory_with(5), memory_with(7)
    ours = source.placement(page_ids=(0, 1, 2, 3, 4), slot=0)
    theirs = destination.placement(page_ids=(4, 3, 2, 1, 0), slot=3)
    rows = live_rows(source.layout, num_tokens, has_drafter_state=True)
    write_rows(source, ours, rows, salt=5)

    ranges: list[ByteRange] = []
    sent = tuple(range(0) for _ in rows)
    for num_computed in (100, 200, 256, 290, num_tokens):
        final = final_rows(source.layout, num_tokens, num_computed, has_drafter_state=True)
        ranges += plan_writes(source.layout, ours, theirs, rows_after(final, sent))
        sent = final
    ranges += plan_writes(source.layout, ours, theirs, rows_after(rows, sent))
    copy(source, destination, ranges)

    assert read_rows(destination, theirs, rows) == expected_rows(source, rows, salt=5)
    once = plan_writes(source.layout, ours, theirs, rows)
    assert sum(r.length for r in ranges) == sum(r.length for r in once)


def test_nothing_is_written_outside_the_requests_own_blocks() -> None:
    source, destination = memory_with(1), memory_with(15)
    ours = source.placement(page_ids=(0, 1, 2), slot=0)
    theirs = destination.placement(page_ids=(5, 7, 1), slot=2)
    rows = live_rows(source.layout, 300, has_drafter_state=True)
    write_rows(source, ours, rows, salt=1)
    copy(source, destination, plan_writes(source.layout, ours, theirs, rows))

    for index in range(len(source.layout.regions)):
        described = destination.regions[index]
        tensor = destination.pool.buffers[described.name].tensor
        used = [5, 7, 1] if described.name in ("csa", "index", "hca") else [2]
        others = [block for block in range(tensor.shape[1]) if block not in used]
        assert not tensor[:, others].any(), described.name


def test_contiguous_pages_on_both_sides_are_one_range_per_layer() -> None:
    source, destination = memory_with(5), memory_with(5)
    ours = source.placement(page_ids=(2, 3, 4, 5), slot=0)
    theirs = destination.placement(page_ids=(6, 7, 8, 9), slot=0)
    rows = whole_pages(source, 512)

    ranges = plan_writes(source.layout, ours, theirs, rows)

    assert [r.length for r in ranges] == [4 * 32 * 16] * 4 + [4 * 16]


def test_ranges_are_cut_exactly_where_a_run_of_pages_ends_on_either_side() -> None:
    source, destination = memory_with(5), memory_with(5)
    ours = source.placement(page_ids=(2, 3, 4, 7, 8), slot=0)
    theirs = destination.placement(page_ids=(1, 2, 6, 7, 8), slot=0)

    ranges = plan_writes(source.layout, ours, theirs, whole_pages(source, 640))

    csa = [r.length for r in ranges if source.layout.regions[r.region].name == "csa"]
    assert csa == [n * 32 * 16 for n in (2, 1, 2)] * 2, "pages 2-3, then 4, then 7-8 of each layer"


def test_scattered_pages_are_a_range_each() -> None:
    source, destination = memory_with(5), memory_with(5)
    ours = source.placement(page_ids=(2, 3, 4), slot=0)
    theirs = destination.placement(page_ids=(6, 8, 10), slot=0)

    ranges = plan_writes(source.layout, ours, theirs, whole_pages(source, 384))

    assert len([r for r in ranges if source.layout.regions[r.region].name == "csa"]) == 2 * 3


def test_a_ring_that_wraps_on_one_side_only_is_cut_there() -> None:
    source, destination = memory_with(1), memory_with(15)
    ours, theirs = (m.placement(page_ids=(0, 1), slot=0) for m in (source, destination))
    rows = live_rows(source.layout, 135, has_drafter_state=False)
    only_window = (rows[0], *(range(0) for _ in rows[1:]))

    ranges = plan_writes(source.layout, ours, theirs, only_window)

    # Rows 7..134: the sender's ring of 130 wraps before row 130, the receiver's of 144 does not.
    assert [r.length // 12 for r in ranges] == [123, 5] * 3


def test_a_drafter_that_stays_behind_moves_no_rows() -> None:
    layout = small_layout()
    rows = live_rows(layout, 200, has_drafter_state=False)
    assert not rows[-1] and rows[0]


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_digest_is_the_same_wherever_the_rows_lie(num_tokens: int, dtype: str) -> None:
    digests = set()
    for draft_length in DRAFT_LENGTHS:
        memory = memory_with(draft_length, dtype=dtype)
        page_ids = random.Random(draft_length).sample(range(12), 5)
        placement = memory.placement(page_ids=tuple(page_ids), slot=draft_length % 4)
        rows = live_rows(memory.layout, num_tokens, has_drafter_state=True)
        write_rows(memory, placement, rows, salt=9)
        digests.add(digest_rows(memory, placement, rows))
    assert len(digests) == 1


def test_the_digest_sees_a_single_flipped_bit_of_any_row() -> None:
    memory = memory_with(5)
    placement = memory.placement(page_ids=(1, 3), slot=1)
    rows = live_rows(memory.layout, 135, has_drafter_state=True)
    write_rows(memory, placement, rows, salt=3)
    before = digest_rows(memory, placement, rows)
    for index, region in enumerate(memory.layout.regions):
        for row in (rows[index].start, rows[index].stop - 1):
            flipped = memory.placement(page_ids=(1, 3), slot=1)
            _flip(memory, flipped, index, len(region.layer_ids) - 1, row)
            assert digest_rows(memory, placement, rows) != before, (region.name, row)
            _flip(memory, flipped, index, len(region.layer_ids) - 1, row)
    assert digest_rows(memory, placement, rows) == before


def _flip(memory: PoolMemory, placement: Placement, index: int, layer: int, row: int) -> None:
    offset = row_offset(memory, placement, index, layer, row)
    memory.write(index, offset, memoryview(bytes([memory.read(index, offset, 1)[0] ^ 1])))


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 130, 300, 512])
def test_digests_that_were_taken_page_by_page_are_those_of_the_whole(num_tokens: int) -> None:
    memory = memory_with(5)
    placement = memory.placement(page_ids=(3, 1, 7, 8), slot=2)
    rows = live_rows(memory.layout, num_tokens, has_drafter_state=True)
    write_rows(memory, placement, rows, salt=4)
    digest, sent = RowDigest(memory, placement), tuple(range(0) for _ in rows)
    for num_computed in range(0, num_tokens, 100):
        final = final_rows(memory.layout, num_tokens, num_computed, has_drafter_state=True)
        digest.update(rows_after(final, sent))
        digest.digests()
        sent = final
    digest.update(rows_after(rows, sent))
    assert digest.digests() == digest_rows(memory, placement, rows)


def test_digests_are_computed_once_for_the_rows_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = memory_with(5)
    placement = memory.placement(page_ids=(3, 1, 7, 8), slot=2)
    rows = live_rows(memory.layout, 300, has_drafter_state=True)
    write_rows(memory, placement, rows, salt=4)
    early = final_rows(memory.layout, 300, 200, has_drafter_state=True)
    digest = RowDigest(memory, placement)
    digest.update(early)
    found = digest.digests()
    with monkeypatch.context() as patch:
        patch.setattr(xxhash, "xxh3_128", None)
        digest.update(tuple(range(0) for _ in rows))
        assert digest.digests() == found
    digest.update(rows_after(rows, early))
    assert digest.digests() == digest_rows(memory, placement, rows)


def test_a_digest_says_which_region_differs() -> None:
    memory = memory_with(5)
    placement = memory.placement(page_ids=(1, 3), slot=1)
    rows = live_rows(memory.layout, 135, has_drafter_state=True)
    before = digest_rows(memory, placement, rows)
    _flip(memory, placement, 1, 0, rows[1].start)
    after = digest_rows(memory, placement, rows)
    names = [region.name for region in memory.layout.regions]
    altered = [n for n, old, new in zip(names, before, after, strict=True) if old != new]
    assert altered == ["csa"]
