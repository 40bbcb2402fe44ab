from __future__ import annotations

import asyncio

import pytest

from common.engine.memory import Memory
from common.errors import (
    CapabilityRefused,
    CapacityExhausted,
    DuplicateRequest,
    InvalidRequest,
    RequestNotFound,
)
from common.types import RequestId
from services.decode.reservations import Reservation, Reservations, ReservationState

R = ReservationState


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> Reservations:
    return Reservations(Memory(num_pages=10, num_slots=3), lifetime_s=30.0, clock=clock)


def reserve(
    table: Reservations,
    request_id: str = "r",
    epoch: int = 0,
    *,
    num_tokens: int = 100,
    max_length: int = 300,
) -> Reservation:
    return table.reserve(RequestId(request_id), epoch, num_tokens=num_tokens, max_length=max_length)


def end(table: Reservations, reservation: Reservation) -> None:
    if not reservation.has_ended:
        reservation.move(R.ABORTING)
    table.release(reservation)
    table.check_integrity()


def free(table: Reservations) -> tuple[int, int]:
    return table._memory.num_free_pages, table._memory.num_free_slots


async def test_room_for_the_whole_length_is_set_aside_at_once(table: Reservations) -> None:
    reservation = reserve(table)
    assert free(table) == (7, 2)
    assert reservation.memory.block_table == []
    assert len(reservation.memory.take_all()) == 3
    assert free(table) == (7, 2)
    end(table, reservation)
    assert free(table) == (10, 3)


@pytest.mark.parametrize(
    "path",
    [
        (R.ABORTING,),
        (R.RECEIVING, R.ABORTING),
        (R.RECEIVING, R.READY, R.ABORTING),
        (R.RECEIVING, R.READY, R.RUNNING, R.ABORTING),
        (R.RUNNING, R.ABORTING),
    ],
)
async def test_every_end_leaves_pages_and_slots_as_they_were(
    table: Reservations, path: tuple[ReservationState, ...]
) -> None:
    reservation = reserve(table)
    for state in path:
        if state is R.RECEIVING:
            reservation.memory.take_all()
        reservation.move(state)
        table.check_integrity()
    end(table, reservation)
    assert reservation.state is R.RELEASED and reservation.left.is_set()
    assert free(table) == (10, 3)
    assert len(table) == 0


async def test_no_state_is_skipped_or_taken_twice(table: Reservations) -> None:
    reservation = reserve(table)
    for state in (R.READY, R.RELEASED, R.RESERVED):
        with pytest.raises(AssertionError):
            reservation.move(state)
    reservation.move(R.RECEIVING)
    with pytest.raises(AssertionError):
        reservation.move(R.RECEIVING)
    end(table, reservation)
    with pytest.raises(AssertionError):
        reservation.move(R.ABORTING)


async def test_a_full_worker_holds_nothing_of_what_it_refused(table: Reservations) -> None:
    first = reserve(table, "a", max_length=1000)
    with pytest.raises(CapacityExhausted, match="3 pages are needed and 2 of 10 are free"):
        reserve(table, "b")
    assert free(table) == (2, 2)
    end(table, first)
    held = [reserve(table, name) for name in "abc"]
    with pytest.raises(CapacityExhausted, match="all 3 request slots are taken"):
        reserve(table, "d", max_length=101)
    assert free(table) == (1, 0)
    for reservation in held:
        end(table, reservation)


async def test_a_repeated_question_gets_the_same_answer_until_something_began(
    table: Reservations,
) -> None:
    reservation = reserve(table)
    assert reserve(table) is reservation
    with pytest.raises(DuplicateRequest):
        reserve(table, max_length=301)
    reservation.move(R.RECEIVING)
    with pytest.raises(DuplicateRequest, match="already, receiving"):
        reserve(table)
    end(table, reservation)


async def test_an_older_epoch_is_refused(table: Reservations) -> None:
    reservation = reserve(table, epoch=2)
    with pytest.raises(RequestNotFound, match="is in epoch 2, not 1"):
        reserve(table, epoch=1)
    end(table, reservation)


async def test_lengths_that_make_no_sense_are_refused(table: Reservations) -> None:
    for num_tokens, max_length in ((0, 10), (10, 10), (11, 10)):
        with pytest.raises(InvalidRequest):
            reserve(table, num_tokens=num_tokens, max_length=max_length)
    assert free(table) == (10, 3)


async def test_a_capability_opens_its_own_reservation_and_epoch_only(table: Reservations) -> None:
    a, b = reserve(table, "a", epoch=4), reserve(table, "b")
    assert table.authorize(a.request_id, 4, a.reservation_id, a.capability) is a
    with pytest.raises(CapabilityRefused):
        table.authorize(a.request_id, 4, a.reservation_id, b.capability)
    with pytest.raises(CapabilityRefused):
        table.authorize(a.request_id, 4, a.reservation_id, a.capability[:-1])
    for request_id, epoch, reservation_id in (
        (a.request_id, 3, a.reservation_id),
        (b.request_id, 4, a.reservation_id),
        (a.request_id, 4, "unknown"),
    ):
        with pytest.raises(RequestNotFound):
            table.authorize(request_id, epoch, reservation_id, a.capability)
    a.move(R.ABORTING)
    with pytest.raises(RequestNotFound):
        table.authorize(a.request_id, 4, a.reservation_id, a.capability)
    assert len(a.capability) == 32 and a.capability != b.capability


async def test_what_waits_for_a_silent_peer_expires_and_what_runs_does_not(
    table: Reservations, clock: Clock
) -> None:
    waiting, receiving, running = (reserve(table, name) for name in "abc")
    receiving.move(R.RECEIVING)
    running.move(R.RUNNING)
    clock.now += 29.0
    assert table.expired() == []
    table.touch(receiving)
    clock.now += 1.0
    assert table.expired() == [waiting]
    clock.now += 29.0
    assert table.expired() == [waiting, receiving]


async def test_waiting_for_the_end_of_all_ends(table: Reservations) -> None:
    await table.wait_empty()
    reservation = reserve(table)
    end(table, reservation)
    await table.wait_empty()


async def test_memory_in_quarantine_is_held_while_a_newer_epoch_has_room_of_its_own(
    table: Reservations,
) -> None:
    old = reserve(table)
    old.memory.take_all()
    old.move(R.RECEIVING)
    old.move(R.ABORTING)
    table.quarantine(old)
    assert old.has_ended and old.left.is_set()
    assert table.by_id(old.reservation_id) is None and table.find(old.request_id) is None
    assert free(table) == (7, 2)
    new = reserve(table, epoch=1)
    assert not set(old.memory.block_table) & set(new.memory.take_all())
    assert new.memory.slot != old.memory.slot
    table.check_integrity()
    end(table, new)
    waiting = asyncio.create_task(table.wait_empty())
    await asyncio.sleep(0)
    assert not waiting.done()
    table.release(old)
    table.check_integrity()
    await waiting
    assert free(table) == (10, 3)
