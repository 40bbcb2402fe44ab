"""A worker that gives up, is not there or crashes fails its requests by name, and holds nothing of them."""

from __future__ import annotations

from common.errors import RequestNotFound, TransferFailed, WorkerLost
from tests.support.handoff_cluster import a_context
from tests.support.handoff_pair import Pair, close_gate, require_exact, running
from tests.support.held_transfer import HeldTransfer
from tests.support.refusals import ended, refusal


async def test_decode_gives_up_in_the_middle_of_a_write(pair: Pair) -> None:
    it, context, stream = pair.it, a_context(400), pair.it.stream()
    held = HeldTransfer(it)
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    call = it.start_prefill(context, reserved)
    await held.is_half_way.wait()
    await stream.abort(context)
    await stream.next("finished")
    held.restore()
    error = await ended(call)
    assert isinstance(error, RequestNotFound)
    await it.require_clean()
    await require_exact(pair)


async def test_a_decode_worker_that_is_not_there_fails_the_handoff_by_name(pair: Pair) -> None:
    it, context = pair.it, a_context(200)
    reserved = await it.reserve(context)
    error = await ended(it.start_prefill(context, reserved, decode_address="127.0.0.1:1"))
    assert isinstance(error, TransferFailed)
    assert "hand-off to 127.0.0.1:1" in error.message
    stream = it.stream()
    await stream.abort(context, reserved.reservation_id)
    await stream.next("finished")


async def test_a_crashed_prefill_engine_fails_its_requests_and_takes_no_more(pair: Pair) -> None:
    it, context, stream = pair.it, a_context(400), pair.it.stream()
    gate = close_gate(pair.source)
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    call = it.start_prefill(context, reserved)
    gate.release(1)
    pair.source.crash = RuntimeError("a kernel failed")
    gate.release(1)
    assert isinstance(await ended(call), WorkerLost)
    await stream.next("failed")
    assert it.prefill.engine.has_crashed
    assert isinstance(await ended(it.start_prefill(context, reserved)), WorkerLost)


async def test_a_crashed_decode_engine_fails_its_requests_and_takes_no_more(pair: Pair) -> None:
    it, stream = pair.it, pair.it.stream()
    context, _ = await running(pair, stream)
    await stream.next("verified")
    await stream.next("verified")
    pair.sink.crash = RuntimeError("a kernel failed")
    await stream.commit(context, 1, 203)
    failed = await stream.next("failed")
    assert failed.reason == "WORKER_LOST"
    assert "kernel" not in failed.message
    assert isinstance(await refusal(it.reserve(a_context(10, request_id="x"))), WorkerLost)
