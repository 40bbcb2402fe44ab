"""A client that goes away leaves nothing behind at any phase of its hand-off: free pages and slots equal the start on both
sides, and the next request is exact."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from dspark.v1 import decode_service_pb2
from services.decode.reservations import ReservationState
from tests.support.handoff_cluster import PATIENT, a_context
from tests.support.handoff_pair import Pair, close_gate, open_gate, paired, require_exact, running
from tests.support.held_transfer import HeldTransfer


async def test_abort_of_a_reservation_that_nothing_was_sent_to(pair: Pair) -> None:
    context, stream = a_context(200), pair.it.stream()
    reserved = await pair.it.reserve(context)
    await stream.abort(context, reserved.reservation_id)
    await stream.next("finished")
    await pair.it.require_clean()


async def test_cancel_while_the_prefill_waits_for_room(pair: Pair) -> None:
    it = pair.it
    close_gate(pair.source)
    running = []
    for index in range(4):
        context = a_context(20, request_id=f"r{index}")
        running.append(it.start_prefill(context, await it.reserve(context, request_id=f"r{index}")))
    await it.until(lambda: it.prefill.room.memory.num_free_slots == 0)
    waiting = a_context(20, request_id="waiting")
    call = it.start_prefill(waiting, decode_service_pb2.ReserveResponse(reservation_id="none"))
    await it.until(lambda: it.prefill.room.num_queued == 1)
    call.cancel()
    await it.until(lambda: it.prefill.room.num_queued == 0)
    for each in running:
        each.cancel()
    open_gate(pair.source)
    await it.require_clean()
    await require_exact(pair)


async def test_cancel_while_the_decode_worker_does_not_answer() -> None:
    """A peer that accepts connections and says nothing must hold neither room nor the call."""
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with paired(replace(PATIENT, abort_timeout_s=0.05)) as pair:
        it, context = pair.it, a_context(200)
        reserved = await it.reserve(context)
        call = it.start_prefill(context, reserved, decode_address=address)
        assert (await call.read()).WhichOneof("event") == "first_token"
        call.cancel()
        await it.until(lambda: it.prefill.num_jobs == 0)
        silent.close()
        stream = it.stream()
        await stream.abort(context, reserved.reservation_id)
        await stream.next("finished")
        await it.require_clean()
        await require_exact(pair)


@pytest.mark.parametrize("is_admitted", [True, False])
async def test_cancel_in_the_middle_of_the_prompt(pair: Pair, is_admitted: bool) -> None:
    it, context, stream = pair.it, a_context(400), pair.it.stream()
    gate = close_gate(pair.source)
    reserved = await it.reserve(context)
    if is_admitted:
        await stream.admit(context, reserved)
    call = it.start_prefill(context, reserved)
    gate.release(5)
    await it.until(lambda: it.decode.intake.counts["received_bytes"] > 0)
    job = it.prefill.jobs.of_epoch(context.request_id, 0)
    assert job is not None
    call.cancel()
    await it.until(lambda: job.is_ending)
    open_gate(pair.source)
    if is_admitted:
        failed = await stream.next("failed")
        assert failed.reason == "KV_TRANSFER_FAILED"
        assert "gave up" in failed.message
    await it.require_clean()
    await require_exact(pair)


async def test_cancel_in_the_middle_of_a_write(pair: Pair) -> None:
    it, context, stream = pair.it, a_context(400), pair.it.stream()
    held = HeldTransfer(it)
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    call = it.start_prefill(context, reserved)
    await held.is_half_way.wait()
    call.cancel()
    await stream.next("failed")
    await it.require_clean()
    held.restore()
    await require_exact(pair)


async def test_the_source_is_not_freed_before_its_write_has_stopped(pair: Pair) -> None:
    it, context = pair.it, a_context(400)
    held = HeldTransfer(it)
    engine = cast(Any, it.prefill.pairs.engines.by_name["grpc"])
    cancel, asked, may_stop = engine.cancel, asyncio.Event(), asyncio.Event()

    async def reluctant(transfer: Any, *, timeout_s: float) -> bool:
        asked.set()
        if not may_stop.is_set():
            await asyncio.sleep(0)
            return False
        return bool(await cancel(transfer, timeout_s=timeout_s))

    engine.cancel = reluctant
    reserved = await it.reserve(context)
    call = it.start_prefill(context, reserved)
    await held.is_half_way.wait()
    call.cancel()
    await asked.wait()
    await it.until(lambda: it.prefill.num_jobs == 0)
    memory, quarantine = it.prefill.room.memory, it.prefill.quarantine
    await quarantine.ask_all()
    assert (memory.num_free_slots, quarantine.num_pages) == (memory.num_slots - 1, 4)
    may_stop.set()
    await quarantine.ask_all()
    assert (memory.num_free_slots, quarantine.num_pages) == (memory.num_slots, 0)
    engine.cancel = cancel
    held.restore()
    await it.require_clean()


async def test_abort_after_the_handoff_and_before_admission(pair: Pair) -> None:
    it, context, stream = pair.it, a_context(200), pair.it.stream()
    reserved = await it.reserve(context)
    await it.hand_over(context, reserved)
    assert it.decode.reservations.num_in(ReservationState.READY) == 1
    await stream.abort(context, reserved.reservation_id)
    await stream.next("finished")
    await stream.admit(context, reserved)
    assert (await stream.next("failed")).reason == "REQUEST_NOT_FOUND"
    await it.require_clean()
    await require_exact(pair)


async def test_abort_of_a_running_request(pair: Pair) -> None:
    stream = pair.it.stream()
    context, _ = await running(pair, stream)
    await stream.abort(context)
    await stream.skip_to("finished")
    await pair.it.require_clean()
    await require_exact(pair)
