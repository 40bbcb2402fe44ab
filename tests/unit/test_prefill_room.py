from __future__ import annotations

import asyncio

import pytest

from common.engine.memory import Memory
from common.errors import CapacityExhausted, LeaseEnded, QueueFull
from common.kv_cache.layout import PAGE_TOKENS
from common.types import Proposal, RequestId
from services.prefill.leases import FinishedState, Lease, Leases
from services.prefill.loop import FirstTokenSampled, PromptFinished
from services.prefill.room import Room

STATE = FinishedState(
    tokens=(1, 2, 3),
    finished=PromptFinished(
        first=FirstTokenSampled(
            request_id=RequestId("r"),
            epoch=0,
            token_id=4,
            logprob=None,
            first_scheduled_at=0.0,
            sampled_at=0.0,
        ),
        proposal=Proposal(),
        finished_at=0.0,
    ),
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def room(clock: Clock) -> Room:
    memory = Memory(num_pages=6, num_slots=3)
    return Room(memory, Leases(lease_s=10.0, clock=clock), max_queued=2)


def free(room: Room) -> tuple[int, int]:
    room.memory.check_integrity()
    return room.memory.num_free_pages, room.memory.num_free_slots


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_room_is_given_at_once_while_there_is_some(room: Room) -> None:
    memory = await room.acquire(300)
    assert len(memory.block_table) == 3
    assert free(room) == (3, 2)
    room.release(memory)
    assert free(room) == (6, 3)


async def test_requests_get_room_in_the_order_of_their_arrival(room: Room) -> None:
    first = await room.acquire(600)
    large = asyncio.create_task(room.acquire(700))
    await settle()
    small = asyncio.create_task(room.acquire(100))
    await settle()
    # One page is free, and the small one would fit; it does not overtake.
    assert not small.done() and room.num_queued == 2
    room.release(first)
    room.release(await large)
    room.release(await small)
    assert free(room) == (6, 3)


async def test_a_queue_has_an_end(room: Room) -> None:
    memory = await room.acquire(700)
    waiting = [asyncio.create_task(room.acquire(100)) for _ in range(2)]
    await settle()
    with pytest.raises(QueueFull, match="2 requests wait for room already"):
        await room.acquire(100)
    room.release(memory)
    for turn in waiting:
        room.release(await turn)
    assert free(room) == (6, 3)


async def test_what_can_never_fit_is_refused_at_once(room: Room) -> None:
    with pytest.raises(CapacityExhausted, match="needs 7 pages; at most 6 go to one request here"):
        await room.acquire(800)


async def test_who_gives_up_waiting_lets_the_next_one_through(room: Room) -> None:
    memory = await room.acquire(600)
    large = asyncio.create_task(room.acquire(700))
    await settle()
    small = asyncio.create_task(room.acquire(100))
    await settle()
    large.cancel()
    await settle()
    assert small.done()
    room.release(small.result())
    room.release(memory)
    assert free(room) == (6, 3)


async def test_who_gives_up_in_the_moment_of_its_turn_gives_the_room_back(room: Room) -> None:
    memory = await room.acquire(700)
    waiting = asyncio.create_task(room.acquire(100))
    await settle()
    room.release(memory)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert free(room) == (6, 3)


async def test_leases_give_way_to_requests_oldest_first(room: Room, clock: Clock) -> None:
    leases = []
    for _ in range(3):
        leases.append(room.leases.grant(await room.acquire(200), STATE))
        clock.now += 1.0
    assert free(room) == (0, 0)
    memory = await room.acquire(300)
    lease_ids = [lease.lease_id for lease in leases]
    assert room.leases.renew(lease_ids) == lease_ids[:2]
    room.release(memory)
    assert room.leases.release(leases[2].lease_id)
    assert free(room) == (6, 3)


async def test_a_lease_ends_once_by_release_or_by_time_unless_it_is_renewed(
    room: Room, clock: Clock
) -> None:
    released, renewed, overdue = [
        room.leases.grant(await room.acquire(100), STATE) for _ in range(3)
    ]
    assert len(room.leases) == 3
    assert room.leases.release(released.lease_id)
    assert not room.leases.release(released.lease_id)
    clock.now = 9.0
    assert room.leases.renew([renewed.lease_id]) == []
    clock.now = 10.0
    assert room.leases.expire() == 1
    assert room.leases.renew([overdue.lease_id]) == [overdue.lease_id]
    clock.now = 19.0
    assert room.leases.expire() == 1
    assert room.leases.num_expired == 2
    assert free(room) == (6, 3)
    assert not room.leases.unread(0)


async def test_a_room_that_is_read_is_free_when_its_last_reader_has_stopped(room: Room) -> None:
    """A lease may be read by several hand-offs at once; none of them may see another request's rows."""
    lease = room.leases.grant(await room.acquire(200), STATE)
    readers = [room.leases.open(lease.lease_id) for _ in range(2)]
    assert room.leases.release(lease.lease_id)
    with pytest.raises(LeaseEnded):
        room.leases.open(lease.lease_id)
    for reader in readers:
        assert free(room) == (4, 2)
        room.leases.close(reader)
    assert free(room) == (6, 3)


async def test_a_lease_that_is_read_gives_way_to_nobody_and_begins_anew(
    room: Room, clock: Clock
) -> None:
    read, unread = [room.leases.grant(await room.acquire(300), STATE) for _ in range(2)]
    clock.now = 6.0
    room.leases.open(read.lease_id)
    clock.now = 5.0
    assert room.leases.unread(0) == [unread]
    room.leases.evict(unread)
    assert room.leases.renew([unread.lease_id]) == [unread.lease_id]
    assert not room.leases.unread(0)
    clock.now = 12.0
    assert room.leases.expire() == 0
    clock.now = 16.0
    assert room.leases.expire() == 1
    assert free(room) == (3, 2)
    room.leases.close(read)
    assert free(room) == (6, 3)


def in_two_groups(clock: Clock) -> Room:
    memory = Memory(num_pages=12, num_slots=6, num_groups=2)
    return Room(memory, Leases(lease_s=10.0, clock=clock), max_queued=2)


async def leases_of(room: Room, clock: Clock, *num_pages: int) -> list[Lease]:
    """Leases of so many pages each, the first one the oldest; they go to the groups in turn."""
    leases = []
    for i, count in enumerate(num_pages):
        leases.append(room.leases.grant(await room.acquire(count * PAGE_TOKENS), STATE))
        assert leases[-1].memory.group == i % 2
        clock.now += 1.0
    return leases


async def test_leases_end_in_the_group_where_the_fewest_make_room(clock: Clock) -> None:
    """Guards a former bug: the oldest leases ended first, in whichever group, and one of them in vain."""
    room = in_two_groups(clock)
    leases = await leases_of(room, clock, 2, 5, 4)
    memory = await room.acquire(5 * PAGE_TOKENS)
    assert memory.group == 1
    lease_ids = [lease.lease_id for lease in leases]
    assert room.leases.renew(lease_ids) == [lease_ids[1]]


async def test_where_as_few_make_room_the_oldest_of_the_group_end_first(clock: Clock) -> None:
    room = in_two_groups(clock)
    leases = await leases_of(room, clock, 2, 3, 2, 3, 2)
    memory = await room.acquire(3 * PAGE_TOKENS)
    assert memory.group == 1
    assert leases[1].has_ended
    assert [lease.has_ended for lease in leases].count(True) == 1


async def test_no_lease_ends_in_vain_in_any_group(clock: Clock) -> None:
    """The room of running requests lacks in both groups; a slot that a lease gives up would help nobody."""
    room = in_two_groups(clock)
    running = [await room.acquire(3 * PAGE_TOKENS) for _ in range(2)]
    leases = await leases_of(room, clock, 3, 3)
    waiting = asyncio.create_task(room.acquire(5 * PAGE_TOKENS))
    await settle()
    assert not waiting.done() and not any(lease.has_ended for lease in leases)
    room.release(running[1])
    assert (await waiting).group == 1
    assert [lease.has_ended for lease in leases] == [False, True]


async def test_a_lease_that_gives_its_slot_up_is_enough_where_pages_are_free(clock: Clock) -> None:
    room = in_two_groups(clock)
    leases = await leases_of(room, clock, 1, 1, 1, 1, 1, 1)
    room.leases.open(leases[0].lease_id)
    room.leases.open(leases[2].lease_id)
    memory = await room.acquire(PAGE_TOKENS)
    assert [lease.has_ended for lease in leases].count(True) == 1
    assert leases[4 if memory.group == 0 else 1].has_ended
