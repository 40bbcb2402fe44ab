"""Leased state stays where it is for whoever reads it, whatever becomes of the lease and of other readers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from common.types import RequestContext, RequestId
from tests.support import engines
from tests.support.handoff_cluster import a_context
from tests.support.kept import NUM_PAGES, NUM_TOKENS, Kept, info_of, kept
from tests.support.waiting import WAIT_S


async def test_a_reader_that_is_given_up_leaves_the_lease_to_others() -> None:
    async with kept() as it:
        context = it.later(3)
        reserved = await it.other.reserve(context)
        it.held.hold()
        call = it.ask(context, reserved)
        await it.held.is_half_way.wait()
        call.cancel()
        await it.other.until(lambda: len(it.other.decode.reservations) == 0)
        it.held.release()
        await it.go_on(it.later(3, epoch=2))


@pytest.mark.parametrize("engine", engines.ALL)
async def test_a_lease_that_ends_while_it_is_read_is_read_to_its_end(engine: str) -> None:
    async with kept(engine) as it:
        context, room = it.later(5), it.first.prefill.room
        stream, reserved = it.other.stream(), await it.other.reserve(context)
        await stream.admit(context, reserved)
        it.held.hold()
        call = it.ask(context, reserved)
        await it.held.is_half_way.wait()
        it.first.prefill.leases._leases[it.lease_id].expires_at = 0.0
        it.first.prefill.expire()
        assert len(it.first.prefill.leases) == 0
        # Whoever comes now must not get the rows that are still to be sent.
        assert room.memory.num_free_slots == room.memory.num_slots - 1
        newcomer = a_context(NUM_TOKENS, request_id="newcomer", first=99)
        await it.first.hand_over(newcomer, await it.first.reserve(newcomer))
        it.held.release()
        await call
        await stream.next("admitted")
        await stream.skip_to("verified")
        assert it.sink.wrong_rows == []
        await stream.abort(context)
        await stream.skip_to("finished")
        await it.first.stream().abort(newcomer)
        await it.first.until(lambda: len(it.first.decode.reservations) == 0)


async def test_a_source_that_may_still_be_read_stays_when_its_lease_and_its_reader_have_ended() -> (
    None
):
    async with kept("direct") as it:
        context, prefill = it.later(5), it.first.prefill
        reserved = await it.other.reserve(context)
        it.held.hold(num_denials=1)
        call = it.ask(context, reserved)
        await it.held.is_half_way.wait()
        prefill.release_lease(it.lease_id)
        call.cancel()
        await it.first.until(lambda: prefill.quarantine.num_pages == NUM_PAGES)
        assert prefill.room.memory.num_free_slots == prefill.room.memory.num_slots - 1
        prefill.begin_draining()
        idle = asyncio.create_task(prefill.wait_idle())
        info = await info_of(it)
        assert (info.num_leases, info.running_requests, info.safe_to_delete) == (0, 0, False)
        await prefill.quarantine.ask_all()
        await asyncio.wait_for(idle, WAIT_S)
        assert prefill.is_safe_to_delete
        assert prefill.room.memory.num_free_slots == prefill.room.memory.num_slots
        it.held.release()
        await release_if_there(it, context, reserved)


async def test_two_requests_read_the_same_state_at_the_same_time() -> None:
    async with kept() as it:
        contexts = [it.later(2), replace(it.later(5), request_id=RequestId("another"))]
        streams = [it.other.stream() for _ in contexts]
        reserved = [await it.other.reserve(context) for context in contexts]
        for stream, context, room in zip(streams, contexts, reserved, strict=True):
            await stream.admit(context, room)
        it.held.hold()
        first = it.ask(contexts[0], reserved[0])
        await it.held.is_half_way.wait()
        # The second begins and ends while the first stands still.
        await it.ask(contexts[1], reserved[1])
        await streams[1].next("admitted")
        (lease,) = it.first.prefill.leases._leases.values()
        assert lease.num_readers == 1 and not first.done()
        it.held.release()
        await first
        await streams[0].next("admitted")
        assert lease.num_readers == 0
        for stream, context in zip(streams, contexts, strict=True):
            await stream.skip_to("verified")
            await stream.abort(context)
            await stream.skip_to("finished")
        assert len(it.sink.adopted) == 2
        assert it.sink.wrong_rows == []


async def release_if_there(it: Kept, context: RequestContext, reserved: Any) -> None:
    """The end of the hand-off may have ended the reservation already."""
    stream = it.other.stream()
    await stream.abort(context, reserved.reservation_id)
    await it.other.until(lambda: len(it.other.decode.reservations) == 0)
