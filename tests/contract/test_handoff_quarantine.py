"""Memory that a one-sided engine may still write to is nobody's until its sender has certainly stopped.

A write that was given up can land later. Here it always does: the second half of a held write arrives only after both sides
have given the hand-off up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import grpc.aio
import pytest

from common.errors import CapabilityRefused, WorkerLost
from common.rpc.status import error_of_call
from common.rpc.worker_info import WorkerIdentity
from common.transfer import convert
from common.transfer.engine import TransferEngine
from common.transfer.memory import PoolMemory
from common.types import RequestContext
from dspark.v1 import handoff_service_pb2, prefill_service_pb2
from services.decode import senders
from services.decode.quarantine import SETTLE_S, SenderState
from services.decode.reservations import Reservation, ReservationState
from services.decode.servicer import load_of as decode_load
from services.prefill.handoff import Handoff
from services.prefill.servicer import load_of as prefill_load
from tests.support import engines
from tests.support.engines import HeldEngine
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.figures import figure
from tests.support.handoff_cluster import Cluster, a_context, cluster
from tests.support.sender import key_of
from tests.support.small_cache import small_layout
from tests.support.waiting import WAIT_S

NUM_TOKENS = 200
NUM_PAGES = 2
"""Of a hand-off's positions."""
FOR_EVER = 1_000_000


@dataclass(kw_only=True)
class Stuck:
    """A request that both sides gave up in the middle of a write."""

    it: Cluster
    sink: FakeEngine
    held: HeldEngine
    context: RequestContext
    reserved: Any
    reservation: Reservation
    call: Any
    """The prefill, as its router follows it."""

    @property
    def key(self) -> handoff_service_pb2.HandoffKey:
        generation = self.it.prefill.identity.generation
        return convert.key_to_pb(key_of(self.context, self.reserved, generation=generation))

    @property
    def state(self) -> ReservationState:
        return self.reservation.state

    @property
    def num_quarantined(self) -> tuple[int, int]:
        """Pages at prefill and at decode."""
        return self.it.prefill.quarantine.num_pages, self.it.decode.quarantine.num_pages

    async def acknowledge(self, capability: bytes, key: handoff_service_pb2.HandoffKey) -> None:
        request = handoff_service_pb2.AbortHandoffRequest(key=key, capability=capability)
        await self.it.handoff_stub.AbortHandoff(request, timeout=WAIT_S)

    async def let_it_land(self) -> None:
        """The sender's engine can say at last that the write has stopped."""
        self.held.num_denials = 0
        await self.it.prefill.tend()

    def bytes_of_pages(self) -> list[bytes]:
        """What is in the pages and the slot that decode gave to the request."""
        memory = self.sink.memory
        found = []
        for index, region in enumerate(memory.regions):
            paged = self.reservation.memory.block_table
            blocks = [self.reservation.memory.slot] if "tail" in region.name else paged
            found += [
                bytes(memory.read(index, b * region.block_stride_bytes, region.block_stride_bytes))
                for b in blocks
                if b * region.block_stride_bytes < region.total_bytes
            ]
        return found


@contextlib.asynccontextmanager
async def stuck(engine: str, *, num_denials: int = FOR_EVER) -> AsyncIterator[Stuck]:
    layout = small_layout()
    sink = FakeEngine(layout, draft_length=7)
    wrapped: list[HeldEngine] = []

    def wrap(inner: TransferEngine, memory: PoolMemory) -> HeldEngine:
        wrapped.append(HeldEngine(inner))
        return wrapped[-1]

    with engines.using(engine, wrap):
        async with cluster(loaded(FakeEngine(layout)), loaded(sink)) as it:
            held = wrapped[0]
            held.hold(num_denials=num_denials)
            context = a_context(NUM_TOKENS)
            reserved = await it.reserve(context)
            (reservation,) = it.decode.reservations.all()
            call = it.start_prefill(context, reserved)
            await held.is_half_way.wait()
            yield Stuck(
                it=it,
                sink=sink,
                held=held,
                context=context,
                reserved=reserved,
                reservation=reservation,
                call=call,
            )
            held.num_denials = 0
            held.release()
            call.cancel()
            for reservation in it.decode.reservations.all():
                it.decode.end(reservation, WorkerLost("the test is over"))
            await it.until(lambda: it.prefill.num_jobs == 0)
            await it.prefill.quarantine.ask_all()
            it.decode.quarantine._ask_sender = _say_yes
            await it.decode.quarantine.ask_all()
            await it.require_clean()


async def _say_yes(*_: Any) -> SenderState:
    return SenderState.STOPPED


async def give_up(it: Stuck) -> None:
    """By decode, which asks prefill to stop; prefill cannot."""
    it.it.decode.end(it.reservation, WorkerLost("given up here"))
    await it.it.until(lambda: it.it.prefill.num_jobs == 0)


async def hand_over_exactly(it: Cluster, sink: FakeEngine, request_id: str) -> list[int]:
    """Another request, whole and exact; returns the pages that it used."""
    context, stream = a_context(NUM_TOKENS, request_id=request_id, first=77), it.stream()
    reserved = await it.reserve(context)
    (reservation,) = [r for r in it.decode.reservations.all() if r.request_id == request_id]
    await stream.admit(context, reserved)
    await it.hand_over(context, reserved)
    await stream.next("admitted")
    pages = list(reservation.memory.block_table)
    await stream.commit(context, 0, context.length + 1, finish=True)
    await stream.skip_to("finished")
    assert sink.wrong_rows == []
    return pages


async def require_gone(it: Stuck) -> None:
    """The sender is known to be gone, and when what it had sent is in, its pages are free."""
    quarantine, now = it.it.decode.quarantine, time.monotonic()
    quarantine._clock = lambda: now
    await quarantine.ask_all()
    await quarantine.ask_all()
    assert it.num_quarantined[1] == NUM_PAGES
    quarantine._clock = lambda: now + SETTLE_S
    await quarantine.ask_all()
    assert it.num_quarantined[1] == 0


@pytest.mark.parametrize("engine", engines.ONE_SIDED)
async def test_a_write_that_lands_after_all_lands_in_nobodys_memory(engine: str) -> None:
    async with stuck(engine) as it:
        await give_up(it)
        assert it.state is ReservationState.QUARANTINED
        assert it.num_quarantined == (NUM_PAGES, NUM_PAGES)
        pages = set(it.reservation.memory.block_table)
        assert not pages & set(await hand_over_exactly(it.it, it.sink, "b"))
        before = it.bytes_of_pages()
        await it.let_it_land()
        assert it.bytes_of_pages() != before, "the late write changed nothing: this shows nothing"
        # The sender's word that it has stopped reached decode with it.
        assert it.num_quarantined == (0, 0)
        assert it.reservation.state is ReservationState.RELEASED
        assert pages & set(await hand_over_exactly(it.it, it.sink, "c"))


async def test_an_engine_that_asks_the_receiver_needs_no_quarantine_there() -> None:
    async with stuck("grpc") as it:
        pages = set(it.reservation.memory.block_table)
        it.it.decode.end(it.reservation, WorkerLost("given up here"))
        assert it.state is ReservationState.RELEASED
        # Nobody has its sender stop but the router, and that cannot either.
        it.call.cancel()
        await it.it.until(lambda: it.it.prefill.num_jobs == 0)
        assert it.num_quarantined == (NUM_PAGES, 0)
        assert pages & set(await hand_over_exactly(it.it, it.sink, "b"))
        await it.let_it_land()
        assert pages & set(await hand_over_exactly(it.it, it.sink, "c"))


async def test_a_newer_epoch_of_the_request_has_room_while_the_old_one_is_in_quarantine() -> None:
    async with stuck("direct") as it:
        pages = set(it.reservation.memory.block_table)
        newer, stream = a_context(NUM_TOKENS, epoch=1, first=99), it.it.stream()
        reserved = await it.it.reserve(newer)
        assert it.state is ReservationState.QUARANTINED
        assert not pages & set(it.it.decode.reservations.all()[0].memory.take_all())
        await it.it.until(lambda: it.it.prefill.num_jobs == 0)
        await stream.admit(newer, reserved)
        await it.it.hand_over(newer, reserved)
        await stream.next("admitted")
        await it.let_it_land()
        await stream.abort(newer)
        await stream.skip_to("finished")
        assert it.sink.wrong_rows == []


async def test_worker_information_and_metrics_tell_of_the_pages_until_they_are_free() -> None:
    async with stuck("direct") as it:
        await give_up(it)
        for load, registry in (
            (prefill_load(it.it.prefill), it.it.prefill.metrics.registry),
            (decode_load(it.it.decode), it.it.decode.metrics.registry),
        ):
            assert load.num_quarantined_pages == NUM_PAGES
            assert figure(registry, "dspark_kv_quarantined_pages") == NUM_PAGES
        await it.let_it_land()
        registries = [worker.metrics.registry for worker in (it.it.prefill, it.it.decode)]
        await it.it.until(
            lambda: all(figure(r, "dspark_kv_quarantined_pages") == 0 for r in registries)
        )


class TestWhoMaySayThatItHasStopped:
    async def test_nobody_without_the_capability(self) -> None:
        async with stuck("direct") as it:
            await give_up(it)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await it.acknowledge(b"not the secret", it.key)
            assert isinstance(error_of_call(caught.value, peer="decode"), CapabilityRefused)
            assert it.num_quarantined[1] == NUM_PAGES

    async def test_no_other_hand_off_of_the_reservation(self) -> None:
        async with stuck("direct") as it:
            await give_up(it)
            other = handoff_service_pb2.HandoffKey()
            other.CopyFrom(it.key)
            other.prefill_generation = "another process"
            await it.acknowledge(it.reserved.capability, other)
            assert it.num_quarantined[1] == NUM_PAGES

    async def test_its_sender_of_its_own_accord(self) -> None:
        """As when the questions of decode do not reach it."""
        async with stuck("direct") as it:
            it.it.decode.quarantine._ask_sender = _is_unheard
            it.it.decode.end(it.reservation, WorkerLost("given up here"))
            for job in it.it.prefill.jobs:
                job.cancel(WorkerLost("given up here"))
            await it.it.until(lambda: it.it.prefill.num_jobs == 0)
            assert it.num_quarantined == (NUM_PAGES, NUM_PAGES)
            await it.let_it_land()
            assert it.num_quarantined == (0, 0)

    async def test_its_sender_when_asked(self) -> None:
        """As when its own word does not reach decode."""
        with mock.patch.object(Handoff, "abort", _is_lost):
            async with stuck("direct") as it:
                await give_up(it)
                await it.let_it_land()
                assert it.num_quarantined == (0, NUM_PAGES)
                await it.it.decode.tend()
                assert it.num_quarantined == (0, 0)

    async def test_another_process_at_the_senders_address(self) -> None:
        layout = small_layout()
        async with (
            cluster(loaded(FakeEngine(layout)), loaded(FakeEngine(layout))) as other,
            stuck_at("direct", lambda: other.prefill_address) as it,
        ):
            it.it.decode.end(it.reservation, WorkerLost("given up here"))
            await require_gone(it)

    async def test_the_senders_host_when_nobody_listens_there(self) -> None:
        async with stuck_at("direct", lambda: "127.0.0.1:1") as it:
            it.it.decode.end(it.reservation, WorkerLost("given up here"))
            await require_gone(it)

    @pytest.mark.parametrize("is_known", [True, False])
    async def test_no_clock(self, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """A sender that does not answer may be writing still, however long it has been silent."""
        monkeypatch.setattr(senders, "ASK_TIMEOUT_S", 0.05)
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}" if is_known else ""
        async with stuck_at("direct", lambda: address) as it:
            it.it.decode.end(it.reservation, WorkerLost("given up here"))
            for _ in range(3):
                it.it.decode.expire()
                await it.it.decode.quarantine.ask_all()
            assert it.num_quarantined[1] == NUM_PAGES
        silent.close()


class TestSource:
    """The sender's pages, by the same rule."""

    async def test_they_are_free_when_the_receiver_is_gone(self) -> None:
        async with stuck("direct") as it:
            await give_up(it)
            await it.it.prefill.quarantine.ask_all()
            assert it.num_quarantined[0] == NUM_PAGES
            await it.it.decode_server.stop(0)
            # It may take a moment until nobody listens on the port; the worker asks once a second.
            async with asyncio.timeout(WAIT_S):
                while it.num_quarantined[0]:
                    await it.it.prefill.quarantine.ask_all()

    async def test_they_are_free_when_the_receiver_was_restarted(self) -> None:
        async with stuck("direct") as it:
            await give_up(it)
            with mock.patch.object(
                it.it.decode, "identity", _of_generation(it.it.decode.identity, "another")
            ):
                await it.it.prefill.quarantine.ask_all()
            assert it.num_quarantined[0] == 0


async def test_a_receiver_may_stop_only_hand_offs_that_are_its_own() -> None:
    async with stuck("direct") as it:
        request = prefill_service_pb2.StopHandoffRequest(key=it.key, capability=b"not the secret")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.it.prefill_stub.StopHandoff(request, timeout=WAIT_S)
        assert isinstance(error_of_call(caught.value, peer="prefill"), CapabilityRefused)
        assert it.it.prefill.num_jobs == 1
        unknown = prefill_service_pb2.StopHandoffRequest(key=it.key, capability=b"")
        unknown.key.reservation_id = "unknown"
        assert (await it.it.prefill_stub.StopHandoff(unknown, timeout=WAIT_S)).stopped
        assert it.it.prefill.num_jobs == 1


@contextlib.asynccontextmanager
async def stuck_at(engine: str, address: Any) -> AsyncIterator[Stuck]:
    """The same, but the sender says that it answers at another address."""
    negotiate = Handoff.negotiate

    async def misleading(handoff: Handoff) -> None:
        handoff._sender.pairs.own_address = address()
        await negotiate(handoff)

    with mock.patch.object(Handoff, "negotiate", misleading):
        async with stuck(engine) as it:
            yield it


def _of_generation(identity: WorkerIdentity, generation: str) -> WorkerIdentity:
    return replace(identity, generation=generation)


async def _is_unheard(*_: Any) -> SenderState:
    return SenderState.UNKNOWN


async def _is_lost(handoff: Handoff, reason: str) -> None:
    return None
