"""A prefill worker that drains hands over what it has, and is kept as long as somebody may come for it or reads it."""

from __future__ import annotations

import asyncio

from tests.support.kept import info_of, kept
from tests.support.sender import release
from tests.support.waiting import WAIT_S


async def test_a_draining_worker_hands_over_what_it_has() -> None:
    async with kept() as it:
        it.first.prefill.is_draining = True
        await it.go_on(it.later(3))


async def test_a_draining_worker_is_kept_for_its_leases_and_for_who_still_reads_them() -> None:
    async with kept() as it:
        context, prefill = it.later(3), it.first.prefill
        assert not (await info_of(it)).safe_to_delete
        prefill.begin_draining()
        idle = asyncio.create_task(prefill.wait_idle())
        info = await info_of(it)
        assert (info.num_leases, info.running_requests, info.safe_to_delete) == (1, 0, False)
        reserved = await it.other.reserve(context)
        it.held.hold()
        call = it.ask(context, reserved)
        await it.held.is_half_way.wait()
        prefill.release_lease(it.lease_id)
        info = await info_of(it)
        assert (info.num_leases, info.running_requests, info.safe_to_delete) == (0, 1, False)
        assert not idle.done()
        it.held.release()
        await call
        await asyncio.wait_for(idle, WAIT_S)
        assert (await info_of(it)).safe_to_delete
        await release(it.other, context, reserved)


async def test_a_draining_worker_does_not_wait_for_leases_that_nobody_renews() -> None:
    async with kept() as it:
        prefill = it.first.prefill
        prefill.begin_draining()
        idle = asyncio.create_task(prefill.wait_idle())
        assert not prefill.is_safe_to_delete
        prefill.leases._leases[it.lease_id].expires_at = 0.0
        prefill.expire()
        await asyncio.wait_for(idle, WAIT_S)
        assert prefill.is_safe_to_delete
