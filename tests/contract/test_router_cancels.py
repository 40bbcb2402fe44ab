"""A client that goes leaves nothing behind, whatever phase its request is in; over sockets, with scripted workers."""

from __future__ import annotations

import asyncio

from common.errors import CapacityExhausted
from dspark.v1 import inference_service_pb2 as pb
from tests.support.router_cluster import STOP, Cluster, generate_request
from tests.support.waiting import LOOK_S, WAIT_S


async def test_while_queued(system: Cluster) -> None:
    system.decode.refusals = [CapacityExhausted("full")] * 1000
    call = system.stub.Generate(generate_request(stop=STOP))
    await system.decode.seen.until(lambda: len(system.decode.reserves) > 1)
    call.cancel()
    await until_idle(system)
    assert not system.decode.admits and not system.prefill.prefills
    system.decode.refusals = []


async def test_while_reserving_gives_the_reservation_back(system: Cluster) -> None:
    system.decode.reserve_gate.clear()
    call = system.stub.Generate(generate_request(stop=STOP))
    await system.decode.seen.until(lambda: bool(system.decode.reserves))
    call.cancel()
    await until_idle(system)
    system.decode.reserve_gate.set()
    await system.decode.seen.until(lambda: bool(system.decode.aborts))
    assert system.decode.aborts[0].reservation_id == "reservation-1"
    assert not system.decode.admits and not system.prefill.prefills


async def test_while_prefilling_ends_both_legs(system: Cluster) -> None:
    system.prefill.start_gate.clear()
    call = system.stub.Generate(generate_request(request_id="r", stop=STOP))
    await system.prefill.seen.until(lambda: bool(system.prefill.prefills))
    call.cancel()
    await system.prefill.seen.until(lambda: system.prefill.cancelled == ["r"])
    await system.decode.seen.until(lambda: [a.request_id for a in system.decode.aborts] == ["r"])


async def test_before_admission_ends_both_legs(system: Cluster) -> None:
    system.prefill.handoff_gate.clear()
    call = system.stub.Generate(generate_request(request_id="r", stop=STOP))
    await anext(aiter(call))
    call.cancel()
    await system.prefill.seen.until(lambda: system.prefill.cancelled == ["r"])
    await system.decode.seen.until(lambda: [a.request_id for a in system.decode.aborts] == ["r"])


async def test_after_admission_ends_decode_and_releases_the_lease(system: Cluster) -> None:
    call = system.stub.Generate(generate_request(request_id="r", stop=STOP))
    responses = aiter(call)
    await anext(responses)
    await anext(responses)
    system.decode.round_gate.clear()
    call.cancel()
    await system.decode.seen.until(lambda: [a.request_id for a in system.decode.aborts] == ["r"])
    await system.prefill.seen.until(lambda: system.prefill.released == ["reservation-1"])


async def test_before_the_lease_was_heard_of_releases_it_all_the_same(system: Cluster) -> None:
    """A request left while the hand-off's last message was on its way used to keep its room for a whole lease."""
    system.prefill.done_gate.clear()
    call = system.stub.Generate(generate_request(request_id="r", stop=STOP))
    responses = aiter(call)
    await anext(responses)
    await anext(responses)
    call.cancel()
    await system.prefill.seen.until(lambda: system.prefill.released == ["reservation-1"])


async def until_idle(system: Cluster) -> None:
    """Wait until the router has no request left."""
    async with asyncio.timeout(WAIT_S):
        while True:
            info = await system.stub.GetServerInfo(pb.GetServerInfoRequest())
            if info.queued_requests == info.running_requests == 0:
                return
            await asyncio.sleep(LOOK_S)
