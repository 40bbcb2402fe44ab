"""Messages that come twice, late or for nothing run nothing twice and end nothing else."""

from __future__ import annotations

import asyncio

from common.errors import ServingError
from common.transfer import convert
from dspark.v1 import handoff_service_pb2
from tests.support.handoff_cluster import a_context
from tests.support.handoff_pair import Pair, close_gate, open_gate, running
from tests.support.refusals import ended
from tests.support.sender import a_result, key_of


async def test_a_repeated_complete_is_accepted_again_and_runs_nothing_twice(pair: Pair) -> None:
    it, stream = pair.it, pair.it.stream()
    context, reserved = await running(pair, stream)
    key = key_of(context, reserved, generation=it.prefill.identity.generation)
    request = convert.result_to_pb(a_result(200), key, reserved.capability)
    # It was accepted with the right digest; a repeat is known by its key, whatever it says.
    assert (await it.handoff_stub.Complete(request)).accepted
    # Nor can the sender take back what it has handed over.
    aborting = handoff_service_pb2.AbortHandoffRequest(
        key=convert.key_to_pb(key), capability=reserved.capability
    )
    await it.handoff_stub.AbortHandoff(aborting)
    assert (await stream.next("verified")).round == 1
    assert len(pair.sink.adopted) == 1
    await stream.abort(context)
    await stream.skip_to("finished")


async def test_a_repeated_admit_runs_nothing_twice(pair: Pair) -> None:
    it, stream = pair.it, pair.it.stream()
    context, reserved = await running(pair, stream)
    await stream.admit(context, reserved)
    await stream.next("verified")
    other = it.stream()
    await other.admit(context, reserved)
    assert (await other.next("failed")).reason == "DUPLICATE_REQUEST"
    assert len(pair.sink.adopted) == 1
    await stream.abort(context)
    await stream.skip_to("finished")


async def test_messages_of_an_older_epoch_are_void(pair: Pair) -> None:
    it, old_stream, stream = pair.it, pair.it.stream(), pair.it.stream()
    old, old_reserved = await running(pair, old_stream)
    context = a_context(203, epoch=1, num_committed=3)
    reserved = await it.reserve(context)
    assert (await old_stream.skip_to("failed")).reason == "ABORTED"
    await stream.admit(context, reserved)
    await it.hand_over(context, reserved)
    await stream.next("admitted")
    await old_stream.commit(old, 1, 203, finish=True)
    await old_stream.abort(old, old_reserved.reservation_id)
    await stream.abort(old, old_reserved.reservation_id)
    await old_stream.admit(old, old_reserved)
    assert (await old_stream.next("failed")).reason == "REQUEST_NOT_FOUND"
    assert (await stream.next("verified")).epoch == 1
    await stream.abort(context)
    await stream.skip_to("finished")


async def test_a_prefill_of_a_newer_epoch_replaces_the_older_one(pair: Pair) -> None:
    it = pair.it
    gate = close_gate(pair.source)
    context = a_context(400)
    reserved = await it.reserve(context)
    call = it.start_prefill(context, reserved)
    gate.release(3)  # a page is sent, and the engine holds the request in a step that does not end
    await it.until(lambda: pair.source.num_gated == 4)
    await it.until(lambda: it.decode.intake.counts["received_bytes"] > 0)
    older = it.prefill.jobs.of_epoch(context.request_id, 0)
    assert older is not None
    newer = a_context(400, epoch=1)
    again = it.start_prefill(newer, await it.reserve(newer))
    # Its decode worker refuses the older one by now, which cleans up while it is told to end: once is enough.
    await it.until(lambda: older.is_ending)
    await asyncio.sleep(0)
    open_gate(pair.source)
    assert (await ended(call)) is not None
    events = [event.WhichOneof("event") async for event in again]
    assert events == ["first_token", "handoff_done"]
    assert isinstance(await ended(it.start_prefill(context, reserved)), ServingError)
    stream = it.stream()
    await stream.abort(newer)
    await stream.next("finished")


async def test_an_abort_of_something_unknown_is_ignored(pair: Pair) -> None:
    stream = pair.it.stream()
    await stream.abort(a_context(5, request_id="unknown"), "no reservation")
    context, _ = await running(pair, stream)
    await stream.abort(context)
    await stream.skip_to("finished")
