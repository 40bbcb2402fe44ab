"""A lease keeps its room until it is released, needed or over."""

from __future__ import annotations

from dspark.v1 import prefill_service_pb2
from tests.support.handoff_cluster import a_context
from tests.support.handoff_pair import Pair, require_exact
from tests.support.held_transfer import HeldTransfer
from tests.support.refusals import ended


async def test_a_lease_keeps_room_until_it_is_released_or_needed(pair: Pair) -> None:
    it, stream = pair.it, pair.it.stream()
    memory = it.prefill.room.memory
    leases = []
    for index in range(4):
        context = a_context(50, request_id=f"r{index}")
        reserved = await it.reserve(context)
        await stream.admit(context, reserved)
        _, done = await it.hand_over(context, reserved)
        leases.append(done.lease_id)
        await stream.skip_to("admitted")
        await stream.commit(context, 0, 51, finish=True)
        await stream.skip_to("finished")
    assert memory.num_free_slots == 0
    release = prefill_service_pb2.ReleaseLeaseRequest(lease_id=leases[2])
    assert (await it.prefill_stub.ReleaseLease(release)).found
    assert not (await it.prefill_stub.ReleaseLease(release)).found
    assert memory.num_free_slots == 1
    await require_exact(pair)
    info = prefill_service_pb2.PrefillServiceGetWorkerInfoRequest()
    assert (await it.prefill_stub.GetWorkerInfo(info)).info.num_leases == 4


async def test_a_lease_that_nobody_releases_ends_by_itself(pair: Pair) -> None:
    it, context, stream = pair.it, a_context(300), pair.it.stream()
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    _, done = await it.hand_over(context, reserved)
    stream.call.cancel()  # the router is gone, and with it whoever could release the lease
    it.prefill.expire()
    assert len(it.prefill.leases) == 1
    it.prefill.leases._leases[done.lease_id].expires_at = 0.0
    it.prefill.expire()
    assert len(it.prefill.leases) == 0
    assert not it.prefill.release_lease(done.lease_id)


async def test_a_lease_is_named_after_its_reservation_and_may_be_released_before_it_is_there(
    pair: Pair,
) -> None:
    """So a router that leaves a request early frees its state without having heard of the lease."""
    it, context = pair.it, a_context(400)
    reserved = await it.reserve(context)
    _, done = await it.hand_over(context, reserved)
    assert done.lease_id == reserved.reservation_id
    held, again = HeldTransfer(it), a_context(400, request_id="again")
    reserved = await it.reserve(again)
    call = it.start_prefill(again, reserved)
    await held.is_half_way.wait()
    assert it.prefill.release_lease(reserved.reservation_id)
    held.restore()
    assert await ended(call) is not None
    assert len(it.prefill.leases) == 1
    await pair.it.stream().abort(context)
    await require_exact(pair)
