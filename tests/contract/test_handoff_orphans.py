"""Prefills whose routers are not there any more, or say nothing: their room is free again by itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from common.rpc import convert
from common.rpc.channel import open_channel
from dspark.v1 import prefill_service_pb2
from dspark.v1.prefill_service_pb2_grpc import PrefillServiceStub
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.handoff_cluster import PATIENT, a_context, cluster
from tests.support.kept import NUM_PAGES, NUM_TOKENS, kept
from tests.support.small_cache import small_layout
from tests.support.waiting import LOOK_S, WAIT_S


async def test_a_prefill_whose_router_vanished_ends_with_its_connection() -> None:
    async with kept() as it:
        channel = open_channel(it.first.prefill_address)
        orphan = a_context(NUM_TOKENS, request_id="orphan", first=31)
        reserved = await it.first.reserve(orphan)
        it.held.hold()
        PrefillServiceStub(channel).Prefill(
            prefill_service_pb2.PrefillRequest(
                context=convert.context_to_pb(orphan),
                ticket=prefill_service_pb2.DecodeTicket(
                    decode_address=it.first.decode_address,
                    reservation_id=reserved.reservation_id,
                    capability=reserved.capability,
                ),
            )
        )
        await it.held.is_half_way.wait()
        await channel.close()
        await it.first.until(lambda: it.first.prefill.num_jobs == 0)
        await it.first.until(lambda: len(it.first.decode.reservations) == 0)
        assert len(it.first.prefill.leases) == 1, "the orphan left a lease"
        it.held.release()


async def test_a_prefill_whose_router_is_silent_is_freed_when_its_lease_ends() -> None:
    """The connection stays, so that nothing but time tells of it: the call is never read and the lease never renewed."""
    layout = small_layout()
    async with cluster(
        loaded(FakeEngine(layout)),
        loaded(FakeEngine(layout)),
        handoff=replace(PATIENT, lease_s=0.05),
    ) as it:
        context, memory = a_context(NUM_TOKENS), it.prefill.room.memory
        reserved = await it.reserve(context)
        call = it.start_prefill(context, reserved)
        await it.until(lambda: len(it.prefill.leases) == 1)
        assert memory.num_free_pages == memory.num_pages - NUM_PAGES
        async with asyncio.timeout(WAIT_S):
            while it.prefill.leases:
                await it.prefill.tend()
                await asyncio.sleep(LOOK_S)
        assert memory.num_free_pages == memory.num_pages
        assert memory.num_free_slots == memory.num_slots
        await it.stream().abort(context, reserved.reservation_id)
        await it.until(lambda: len(it.decode.reservations) == 0)
        call.cancel()  # and not before
