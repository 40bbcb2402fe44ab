"""Ends of every kind, at every phase: free pages and slots equal the start on both sides, and the next request is exact."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from common.errors import (
    ConfigError,
    DeadlinePassed,
    RequestNotFound,
    ServingError,
    TransferFailed,
    WorkerLost,
)
from common.rpc.status import error_of_call
from common.transfer import convert
from common.transfer.engine import WriteTarget
from common.transfer.ranges import ByteRanges
from common.types import RequestContext
from dspark.v1 import decode_service_pb2, handoff_service_pb2, prefill_service_pb2
from services.decode.reservations import ReservationState
from services.prefill.config import HandoffConfig
from tests.contract.test_handoff_refusals import a_result, key_of, refusal
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.handoff_cluster import PATIENT, Cluster, DecodeStream, a_context, cluster
from tests.support.small_cache import small_layout


class Pair:
    """The cluster with its engines at hand."""

    def __init__(self, it: Cluster, source: FakeEngine, sink: FakeEngine) -> None:
        self.it, self.source, self.sink = it, source, sink


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with paired(PATIENT) as running:
        yield running


@contextlib.asynccontextmanager
async def paired(handoff: HandoffConfig) -> AsyncIterator[Pair]:
    layout = small_layout()
    source, sink = FakeEngine(layout), FakeEngine(layout, draft_length=7)
    async with cluster(loaded(source), loaded(sink), handoff=handoff) as it:
        try:
            yield Pair(it, source, sink)
        finally:
            for engine in (source, sink):
                open_gate(engine)
        await it.require_clean()


def close_gate(engine: FakeEngine) -> threading.Semaphore:
    engine.permits = threading.Semaphore(0)
    return engine.permits


def open_gate(engine: FakeEngine) -> None:
    permits, engine.permits = engine.permits, None
    if permits is not None:
        permits.release(1000)


async def require_exact(pair: Pair) -> None:
    """Requests that use the same memory again are whole."""
    it, stream = pair.it, pair.it.stream()
    for index in range(3):
        context = a_context(200 + index, request_id=f"after{index}", first=50 + index)
        reserved = await it.reserve(context)
        await stream.admit(context, reserved)
        await it.hand_over(context, reserved)
        await stream.next("admitted")
        await stream.commit(context, 0, context.length + 1, finish=True)
        await stream.skip_to("finished")
    assert pair.sink.wrong_rows == []


async def ended(call: Any) -> ServingError | None:
    """How a prefill call ended that is not expected to end well."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error_of_call(error, peer="prefill")
    except asyncio.CancelledError:
        return None
    raise AssertionError("the prefill ended well")


class HeldTransfer:
    """Lets half of the first write through and holds the rest until released."""

    def __init__(self, it: Cluster) -> None:
        self.is_half_way = asyncio.Event()
        self.release = asyncio.Event()
        self._engine = cast(Any, it.prefill.pairs.engines.by_name["grpc"])
        self._write = self._engine._write
        self._engine._write = self._half

    async def _half(self, target: WriteTarget, ranges: ByteRanges) -> None:
        half = len(ranges) // 2
        await self._write(target, ranges[:half])
        self.is_half_way.set()
        await self.release.wait()
        await self._write(target, ranges[half:])

    def restore(self) -> None:
        self._engine._write = self._write
        self.release.set()


# ---- the client goes away ----------------------------------------------------------------------------------------


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
    job = it.prefill._jobs[context.request_id]
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


async def running(
    pair: Pair, stream: DecodeStream, request_id: str = "r"
) -> tuple[RequestContext, Any]:
    context = a_context(200, request_id=request_id)
    reserved = await pair.it.reserve(context)
    await stream.admit(context, reserved)
    await pair.it.hand_over(context, reserved)
    await stream.next("admitted")
    return context, reserved


async def test_abort_of_a_running_request(pair: Pair) -> None:
    stream = pair.it.stream()
    context, _ = await running(pair, stream)
    await stream.abort(context)
    await stream.skip_to("finished")
    await pair.it.require_clean()
    await require_exact(pair)


@pytest.mark.parametrize("is_abrupt", [True, False])
async def test_the_end_of_a_routers_stream_ends_its_requests_and_no_others(
    pair: Pair, is_abrupt: bool
) -> None:
    it = pair.it
    going, staying = it.stream(), it.stream()
    await running(pair, going, "a")
    kept, _ = await running(pair, staying, "b")
    admitted_only = a_context(30, request_id="c")
    await going.admit(admitted_only, await it.reserve(admitted_only))
    if is_abrupt:
        going.call.cancel()
    else:
        await going.call.done_writing()
    await it.until(lambda: len(it.decode.reservations) == 1)
    await staying.next("verified")
    await staying.commit(kept, 1, 203)
    await staying.abort(kept)
    await staying.skip_to("finished")
    await it.require_clean()


# ---- a worker goes away ------------------------------------------------------------------------------------------


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


# ---- bytes change on their way -----------------------------------------------------------------------------------


class Corruption:
    """Flips a bit of the next `times` writes that reach the decode worker's memory."""

    def __init__(self, it: Cluster, times: int) -> None:
        self.left = times
        self._memory = cast(Any, it.decode.intake._memory)
        self._write = self._memory.write
        self._memory.write = self._flip

    def _flip(self, region: int, offset: int, payload: memoryview) -> None:
        if self.left:
            self.left -= 1
            payload = memoryview(bytes([payload[0] ^ 1]) + bytes(payload[1:]))
        self._write(region, offset, payload)


async def test_altered_bytes_are_sent_once_more(pair: Pair) -> None:
    it, context, stream = pair.it, a_context(200), pair.it.stream()
    Corruption(it, times=1)
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    _, done = await it.hand_over(context, reserved)
    await stream.next("admitted")
    assert it.decode.intake.counts["digest_mismatches"] == 1
    assert done.num_bytes > 0
    await stream.abort(context)
    await stream.skip_to("finished")
    assert pair.sink.wrong_rows == []


async def test_bytes_that_are_altered_twice_fail_the_request_on_both_sides(pair: Pair) -> None:
    it, context, stream = pair.it, a_context(200), pair.it.stream()
    Corruption(it, times=10_000)
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    error = await ended(it.start_prefill(context, reserved))
    assert isinstance(error, TransferFailed)
    assert "arrived altered 2 times" in error.message
    assert (await stream.next("failed")).reason == "KV_TRANSFER_FAILED"
    assert pair.sink.adopted == []
    await it.require_clean()


# ---- messages come twice or late ---------------------------------------------------------------------------------


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


async def test_commits_may_be_repeated_and_may_not_invent(pair: Pair) -> None:
    it, stream = pair.it, pair.it.stream()
    context, _ = await running(pair, stream)
    for number in (1, 2):
        assert (await stream.next("verified")).round == number
    # Two rounds are out, and the engine waits for a commit.
    await stream.commit(context, 1, 203)
    await stream.commit(context, 1, 203)
    assert (await stream.next("verified")).round == 3
    await stream.commit(context, 3, 207)
    for number in (4, 5):
        assert (await stream.next("verified")).round == number
    await stream.commit(context, 9, 999)
    failed = await stream.next("failed")
    assert "round 9, but the last one offered is 5" in failed.message
    await it.require_clean()


async def test_a_commit_may_cut_a_round_only_to_finish(pair: Pair) -> None:
    it, stream = pair.it, pair.it.stream()
    context, _ = await running(pair, stream)
    await stream.next("verified")
    await stream.commit(context, 1, 202, finish=True)
    await stream.skip_to("finished")
    await it.require_clean()

    context, _ = await running(pair, stream, "s")
    await stream.next("verified")
    await stream.commit(context, 1, 202)
    assert "only a finish may cut" in (await stream.skip_to("failed")).message


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
    older = it.prefill._jobs[context.request_id]
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


# ---- nobody comes for it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["reserved", "receiving", "ready"])
async def test_a_reservation_that_no_router_admits_expires_with_everything_it_holds(
    pair: Pair, state: str
) -> None:
    it, context = pair.it, a_context(400)
    reserved = await it.reserve(context)
    (reservation,) = it.decode.reservations.all()
    call = None
    if state == "receiving":
        close_gate(pair.source).release(3)
        call = it.start_prefill(context, reserved)
        await it.until(lambda: it.decode.intake.counts["received_bytes"] > 0)
    elif state == "ready":
        await it.hand_over(context, reserved)
    assert reservation.state.value == state
    it.decode.expire()
    assert len(it.decode.reservations) == 1
    reservation.expires_at = 0.0
    it.decode.expire()
    assert len(it.decode.reservations) == 0
    if call is not None:
        open_gate(pair.source)
        assert isinstance(await ended(call), RequestNotFound)
    stream = it.stream()
    await stream.admit(context, reserved)
    assert (await stream.next("failed")).reason == "REQUEST_NOT_FOUND"
    await it.require_clean()
    await require_exact(pair)


async def test_an_admitted_request_does_not_expire_while_its_prompt_waits_for_its_turn(
    pair: Pair,
) -> None:
    """The router that admitted it watches over it; a long queue at prefill must not end it here."""
    it, context, stream = pair.it, a_context(100), pair.it.stream()
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    await it.until(lambda: len(it.decode._admissions) == 1)
    it.decode.reservations.all()[0].expires_at = 0.0
    it.decode.expire()
    await it.hand_over(context, reserved)
    await stream.next("admitted")
    await stream.abort(context)
    await stream.skip_to("finished")


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


async def test_an_abort_of_something_unknown_is_ignored(pair: Pair) -> None:
    stream = pair.it.stream()
    await stream.abort(a_context(5, request_id="unknown"), "no reservation")
    context, _ = await running(pair, stream)
    await stream.abort(context)
    await stream.skip_to("finished")


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


async def test_one_engine_step_is_one_message(pair: Pair) -> None:
    it, stream = pair.it, pair.it.stream()
    close_gate(pair.sink)
    contexts = []
    for index in range(3):
        context = a_context(20, request_id=f"r{index}")
        reserved = await it.reserve(context)
        await stream.admit(context, reserved)
        await it.hand_over(context, reserved)
        contexts.append(context)
    for _ in contexts:
        await stream.next("admitted")
    num_messages = len(stream.messages)
    open_gate(pair.sink)
    for _ in contexts:
        await stream.skip_to("verified")
    assert any(len(message.events) >= 2 for message in stream.messages[num_messages:])
    for context in contexts:
        await stream.abort(context)
    await it.until(lambda: len(it.decode.reservations) == 0)


async def test_a_slow_router_pauses_its_request_and_nobody_elses(pair: Pair) -> None:
    slow, quick = pair.it.stream(), pair.it.stream()
    slow_context, _ = await running(pair, slow, "slow")
    context, _ = await running(pair, quick, "quick")
    for number in range(1, 6):
        verified = await quick.next("verified")
        assert verified.round == number
        await quick.commit(context, number, verified.base + len(verified.token_ids))
    assert pair.sink.requests[slow_context.request_id].round == 2
    for stream, each in ((slow, slow_context), (quick, context)):
        await stream.abort(each)
        await stream.skip_to("finished")


async def test_handoff_config_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="negotiate_timeout_s is 0"):
        HandoffConfig(negotiate_timeout_s=0)


async def test_a_prefill_that_nobody_ends_and_nothing_moves_ends_by_itself(pair: Pair) -> None:
    """Whatever its caller allows: here a write is never over."""
    it, context, stream = pair.it, a_context(200), pair.it.stream()
    held = HeldTransfer(it)
    it.prefill._courses._job_timeout_s = 0.1
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    error = await ended(it.start_prefill(context, reserved))
    assert isinstance(error, DeadlinePassed)
    assert (await stream.next("failed")).reason == "KV_TRANSFER_FAILED"
    held.restore()
    it.prefill._courses._job_timeout_s = 60.0
    await it.require_clean()
    await require_exact(pair)
