"""Room in several data parallel groups: which one a request gets, and what is said when none has any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.memory import Memory, RequestMemory
from common.errors import CapacityExhausted
from common.kv_cache.layout import PAGE_TOKENS

ONE_OF_FOUR = (
    "3 pages are needed and {} of 4 are free in data parallel group 0 of 4; "
    "a request lives in one group"
)


def pages(count: int) -> int:
    """The longest request of so many pages."""
    return count * PAGE_TOKENS


def four_groups() -> Memory:
    return Memory(num_pages=16, num_slots=8, num_groups=4)


def test_requests_are_spread_over_the_groups() -> None:
    memory = four_groups()
    rooms = [memory.reserve(pages(1)) for _ in range(8)]
    assert [room.group for room in rooms] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert sorted(room.slot for room in rooms) == list(range(8))
    assert all(room.slot // 2 == room.group for room in rooms)


def test_pages_and_slots_are_numbered_by_the_worker_and_belong_to_the_group() -> None:
    memory = four_groups()
    for group in range(4):
        room = memory.reserve(pages(4))
        assert room.take_all() == list(range(4 * group, 4 * group + 4))
        assert room.slot == 2 * group
        memory.check_integrity()


def test_of_groups_with_as_many_requests_the_one_with_more_pages_is_chosen() -> None:
    memory = Memory(num_pages=8, num_slots=4, num_groups=2)
    large, small = memory.reserve(pages(3)), memory.reserve(pages(1))
    assert (large.group, small.group) == (0, 1)
    assert memory.reserve(pages(1)).group == 1


def test_a_group_with_fewer_requests_is_passed_over_when_it_lacks_pages() -> None:
    memory = Memory(num_pages=8, num_slots=6, num_groups=2)
    rooms = [memory.reserve(pages(1)) for _ in range(3)]
    assert [room.group for room in rooms] == [0, 1, 0]
    filler = memory.reserve(pages(3))
    assert filler.group == 1
    assert memory.reserve(pages(2)).group == 0, "the other one has a slot but no page"


def test_a_request_is_never_spread_over_two_groups() -> None:
    """Eight pages are free, two in each group."""
    memory = four_groups()
    for _ in range(4):
        memory.reserve(pages(2))
    assert memory.num_free_pages == 8
    with pytest.raises(CapacityExhausted, match=ONE_OF_FOUR.format("2")):
        memory.reserve(pages(3))
    memory.check_integrity()
    assert memory.num_free_pages == 8, "what was refused holds nothing"


def test_the_largest_request_is_that_of_one_group() -> None:
    memory = four_groups()
    assert memory.max_request_pages == 4
    memory.reserve(pages(4))
    with pytest.raises(
        CapacityExhausted, match="5 pages are needed and 4 of 4 are free in data parallel"
    ):
        memory.reserve(pages(4) + 1)


def test_one_group_is_not_spoken_of() -> None:
    with pytest.raises(CapacityExhausted) as refused:
        Memory(num_pages=4, num_slots=2).reserve(pages(5))
    assert refused.value.message == "5 pages are needed and 4 of 4 are free"
    assert refused.value.retry_after_s == 1.0


def test_taken_slots_are_named_and_nothing_is_held() -> None:
    memory = Memory(num_pages=16, num_slots=2, num_groups=2)
    for _ in range(2):
        memory.reserve(pages(1))
    with pytest.raises(
        CapacityExhausted, match="all 1 request slots are taken in data parallel group"
    ):
        memory.reserve(pages(1))
    assert (memory.num_free_pages, memory.num_free_slots) == (14, 0)
    memory.check_integrity()


@pytest.mark.parametrize(("num_pages", "num_slots"), [(10, 8), (16, 6)])
def test_parts_must_be_equal(num_pages: int, num_slots: int) -> None:
    with pytest.raises(AssertionError):
        Memory(num_pages=num_pages, num_slots=num_slots, num_groups=4)


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 20)), max_size=40),
)
def test_no_page_or_slot_has_two_owners_and_all_come_back(
    num_groups: int, story: list[tuple[int, bool, int]]
) -> None:
    """Requests of some pages come and, here and there, go; a refusal is right exactly when no group has room."""
    memory = Memory(num_pages=6 * num_groups, num_slots=3 * num_groups, num_groups=num_groups)
    held: list[tuple[RequestMemory, int]] = []
    for num_pages, leaves, which in story:
        if leaves and held:
            room, _ = held.pop(which % len(held))
            room.release()
        else:
            used = [[count for room, count in held if room.group == g] for g in range(num_groups)]
            fits = [len(each) < 3 and sum(each) + num_pages <= 6 for each in used]
            try:
                room = memory.reserve(pages(num_pages))
            except CapacityExhausted:
                assert not any(fits)
            else:
                assert fits[room.group]
                room.take_all()
                held.append((room, num_pages))
        memory.check_integrity()
        slots = [room.slot for room, _ in held]
        taken = [(room.group, page) for room, _ in held for page in room.block_table]
        assert len(set(slots)) == len(slots)
        assert len({page for _, page in taken}) == len(taken)
        assert all(page // 6 == group for group, page in taken)
        assert all(room.slot // 3 == room.group for room, _ in held)
    for room, _ in held:
        room.release()
    assert (memory.num_free_pages, memory.num_free_slots) == (6 * num_groups, 3 * num_groups)
