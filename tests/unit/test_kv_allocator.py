"""Pages, credits and slots under any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.engine.memory import Memory
from common.errors import CapacityExhausted
from common.kv_cache.allocator import PageAllocator, PageCredit, SlotAllocator

NUM_PAGES = 12


class PagesAgainstAModel(RuleBasedStateMachine):
    """A list of holds and a list of credits say what must be free."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.credits: list[PageCredit] = []
        self.holds: list[list[int]] = []

    @property
    def free(self) -> int:
        held = {page for hold in self.holds for page in hold}
        return NUM_PAGES - len(held) - sum(credit.num_left for credit in self.credits)

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def credit(self, count: int) -> None:
        if count > self.free:
            with pytest.raises(CapacityExhausted):
                self.allocator.credit(count)
        else:
            self.credits.append(self.allocator.credit(count))

    @precondition(lambda self: self.credits)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        credit = data.draw(st.sampled_from(self.credits))
        pages = credit.take(data.draw(st.integers(0, credit.num_left)))
        others = {page for hold in self.holds for page in hold}
        assert not others & set(pages), "a page that somebody holds was handed out"
        assert pages == sorted(pages)
        self.holds.append(pages)

    @precondition(lambda self: self.credits)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        credit = data.draw(st.sampled_from(self.credits))
        credit.close()
        credit.close()
        self.credits.remove(credit)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(self.holds))
        self.allocator.share(hold)
        self.holds.append(list(hold))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(self.holds))
        self.allocator.release(hold)
        self.holds.remove(hold)

    @invariant()
    def counts_agree(self) -> None:
        self.allocator.check_integrity()
        assert self.allocator.num_free == self.free


TestPages = PagesAgainstAModel.TestCase
TestPages.settings = settings(max_examples=30, stateful_step_count=30)


def holes(num_pages: int, *free: int) -> PageAllocator:
    """An allocator in which only `free` are free."""
    allocator = PageAllocator(num_pages)
    allocator.credit(num_pages).take(num_pages)
    allocator.release(free)
    return allocator


@pytest.mark.parametrize(
    ("free", "wanted", "given"),
    [
        # The shortest run that is long enough, and the lowest of those.
        ((0, 1, 2, 3, 6, 7, 10, 11), 2, [6, 7]),
        ((0, 1, 2, 3, 6, 7, 8, 10), 3, [6, 7, 8]),
        ((0, 1, 2, 3, 6, 7, 8), 1, [6]),
        # No run is long enough: as few as possible.
        ((0, 2, 3, 4, 6, 7, 9), 5, [2, 3, 4, 6, 7]),
        ((0, 2, 4, 6), 3, [0, 2, 4]),
        ((), 0, []),
    ],
)
def test_pages_are_neighbours_where_a_run_is_long_enough(
    free: tuple[int, ...], wanted: int, given: list[int]
) -> None:
    allocator = holes(12, *free)
    assert allocator.credit(wanted).take(wanted) == given
    allocator.check_integrity()


def test_pages_that_come_back_in_any_order_join_to_one_run() -> None:
    allocator = PageAllocator(6)
    credit = allocator.credit(6)
    assert credit.take(6) == [0, 1, 2, 3, 4, 5]
    allocator.release([4, 1, 5, 3, 0, 2])
    assert [len(run) for run in allocator._free._runs] == [6]


def test_credit_that_is_set_aside_is_not_given_twice() -> None:
    allocator = PageAllocator(4)
    first = allocator.credit(3)
    with pytest.raises(CapacityExhausted, match="2 pages are needed and 1 of 4 are free"):
        allocator.credit(2)
    first.close()
    allocator.credit(4).close()
    allocator.check_integrity()


def test_a_shared_page_is_free_only_after_its_last_holder() -> None:
    allocator = PageAllocator(2)
    credit = allocator.credit(1)
    pages = credit.take(1)
    allocator.share(pages)
    allocator.release(pages)
    assert allocator.num_free == 1
    allocator.release(pages)
    assert allocator.num_free == 2


def test_slots_run_out_with_a_clear_refusal_and_come_back() -> None:
    slots = SlotAllocator(2)
    assert [slots.take(), slots.take()] == [0, 1]
    with pytest.raises(CapacityExhausted, match="all 2 request slots are taken"):
        slots.take()
    slots.release(1)
    assert slots.take() == 1


def test_a_refused_reservation_holds_nothing() -> None:
    memory = Memory(num_pages=4, num_slots=1)
    held = memory.reserve(200)
    with pytest.raises(CapacityExhausted):
        memory.reserve(128)  # no slot
    assert memory.num_free_pages == 2
    with pytest.raises(CapacityExhausted):
        memory.reserve(129 * 128)  # no pages
    assert held.take_all() == [0, 1]
    held.release()
    assert (memory.num_free_pages, memory.num_free_slots) == (4, 1)
    memory.check_integrity()


def test_a_reservation_given_back_before_its_pages_were_taken_leaves_no_trace() -> None:
    memory = Memory(num_pages=4, num_slots=2)
    memory.reserve(512).release()
    assert (memory.num_free_pages, memory.num_free_slots) == (4, 2)
    memory.check_integrity()
