"""A hand-off brought to each of its phases and kept there. Knows how far it is; not who gives it up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock

import grpc.aio

from common.engine.memory import RequestMemory
from common.transfer.engine import TransferEngine
from common.transfer.memory import PoolMemory
from common.types import RequestContext
from services.decode.reservations import Reservation, ReservationState
from services.prefill import courses
from services.prefill.handoff import Handoff
from services.prefill.job import Job
from tests.support import engines
from tests.support.engines import HeldEngine
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.handoff_cluster import FREED_S, Cluster, DecodeStream, a_context, cluster
from tests.support.mid_write import HOLDABLE, MidWrite
from tests.support.mid_write import mid_write as hold_of
from tests.support.small_cache import small_layout
from tests.support.waiting import WAIT_S, in_time, until

NUM_TOKENS = 140


class Bench:
    """A pair of workers, and the request that stands still in it."""

    def __init__(
        self, it: Cluster, source: FakeEngine, sink: FakeEngine, held: HeldEngine, engine: str
    ) -> None:
        self.it, self.source, self.sink, self.held = it, source, sink, held
        self.stream: DecodeStream = it.stream()
        self.context: RequestContext
        self.reservation: Reservation
        self.call: Any = None
        self.mid_write: MidWrite | None = None
        if engine in HOLDABLE:
            receiver = it.decode._engines.by_name[held.name]
            self.mid_write = hold_of(engine, held.inner, receiver)

    @property
    def job(self) -> Job | None:
        """At prefill, as long as it is there."""
        return self.it.prefill.jobs.of_epoch(self.context.request_id, self.context.epoch)

    @property
    def num_computed(self) -> int:
        return 0 if self.job is None else self.job.num_computed

    @property
    def last_source_pages(self) -> set[int]:
        """Where prefill computed the last request that came to its engine."""
        return set(self.source.block_tables[-1])

    async def begin(self, number: int, *, is_admitted: bool) -> None:
        self.context = a_context(NUM_TOKENS, request_id=f"r{number}", first=number % 200 + 1)
        # As the wire does, in less time.
        self.reservation = await self.it.decode.reserve(
            self.context.request_id,
            self.context.epoch,
            num_tokens=self.context.length,
            max_length=self.context.max_length,
            model_fingerprint="",
        )
        self.call = None
        if is_admitted:
            await self.stream.admit(self.context, self.reservation)

    def prefill(self) -> None:
        self.call = self.it.start_prefill(self.context, self.reservation)

    def cancel_prefill(self) -> None:
        if self.call is not None:
            self.call.cancel()

    async def abort_decode(self) -> None:
        await self.stream.abort(self.context, self.reservation.reservation_id)

    async def prefill_hears(self) -> None:
        """Until prefill gives it up, if it has anything of it."""
        await in_time(until(lambda: self.job is None or self.job.is_ending), FREED_S)

    async def decode_hears(self) -> None:
        """Until decode gives it up, and the sender has heard from there if it may be writing into that memory."""
        await in_time(until(lambda: self.reservation.has_ended), FREED_S)
        if self.reservation.state is ReservationState.QUARANTINED:
            await self.prefill_hears()

    def expire(self) -> None:
        """Let the reservation's time be over."""
        self.reservation.expires_at = 0.0
        self.it.decode.expire()

    async def settle(self) -> None:
        """Everything is free on both sides within a second, with nobody told anything more and nothing expired."""
        await in_time(self._settled(), FREED_S)
        assert self.it.decode.quarantine.num_pages == self.it.prefill.quarantine.num_pages == 0

    async def require_exact_in(self, source_pages: set[int], sink_pages: set[int]) -> None:
        """The next requests take these pages again, at prefill and at decode, and find their own rows only."""
        sources, sinks = set[int](), set[int]()
        for number in range(3):
            stream = self.it.stream()
            await self.begin(220 + number, is_admitted=False)
            await stream.admit(self.context, self.reservation)
            await self.it.hand_over(self.context, self.reservation)
            await stream.next("admitted")
            sources |= self.last_source_pages
            sinks |= set(self.reservation.memory.block_table)
            await stream.commit(self.context, 0, self.context.length + 1, finish=True)
            await stream.skip_to("finished")
        assert self.sink.wrong_rows == []
        assert source_pages <= sources
        assert sink_pages <= sinks
        await self.it.require_clean()

    async def _settled(self) -> None:
        if self.call is not None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                async for _ in self.call:
                    pass
        await self.it.require_clean()


@contextlib.asynccontextmanager
async def benched(engine: str) -> AsyncIterator[Bench]:
    layout = small_layout(window=16)
    source, sink = FakeEngine(layout), FakeEngine(layout, draft_length=7)
    wrapped: list[HeldEngine] = []

    def wrap(inner: TransferEngine, memory: PoolMemory) -> HeldEngine:
        wrapped.append(HeldEngine(inner))
        return wrapped[-1]

    with (
        engines.using(engine, wrap),
        # A busy machine is no reason to take a write for one that does not stop.
        mock.patch.object(courses, "ASK_TIMEOUT_S", WAIT_S),
    ):
        async with cluster(loaded(source), loaded(sink), max_queued=100) as it:
            bench = Bench(it, source, sink, wrapped[0], engine)
            await it.prefill.pairs.get(it.decode_address)
            yield bench


Phase = Callable[[Bench], contextlib.AbstractAsyncContextManager[None]]
"""Brings a request that was begun to a phase, and lets go of whatever holds it there when the block ends."""


@contextlib.asynccontextmanager
async def queued(bench: Bench) -> AsyncIterator[None]:
    """Prefill has no room."""
    room = bench.it.prefill.room
    taken: list[RequestMemory] = []
    while room.memory.num_free_slots:
        taken.append(room.memory.reserve(1))
    bench.prefill()
    await until(lambda: room.num_queued == 1)
    yield
    for memory in taken:
        room.release(memory)


@contextlib.asynccontextmanager
async def reserved(bench: Bench) -> AsyncIterator[None]:
    """Prefill has not heard of it."""
    yield


@contextlib.asynccontextmanager
async def negotiating(bench: Bench) -> AsyncIterator[None]:
    """Decode has granted its memory, and prefill has not read the answer."""
    negotiate, has_answered, may_read = Handoff.negotiate, asyncio.Event(), asyncio.Event()

    async def held(handoff: Handoff) -> None:
        await negotiate(handoff)
        has_answered.set()
        await may_read.wait()

    with mock.patch.object(Handoff, "negotiate", held):
        bench.prefill()
        await until(has_answered.is_set)
        yield
        may_read.set()


@contextlib.asynccontextmanager
async def mid_prefill(bench: Bench) -> AsyncIterator[None]:
    """A page is computed and being sent, and the engine is in a step."""
    bench.source.permits = permits = threading.Semaphore(2)
    bench.prefill()
    await until(lambda: bench.num_computed == 128)
    await until(lambda: bench.reservation.state is ReservationState.RECEIVING)
    yield
    bench.source.permits = None
    permits.release(100)


@contextlib.asynccontextmanager
async def mid_transfer(bench: Bench) -> AsyncIterator[None]:
    """Half of the bytes have arrived, and the others have not left."""
    bench.held.hold()
    bench.prefill()
    await until(bench.held.is_half_way.is_set)
    yield
    bench.held.release()


@contextlib.asynccontextmanager
async def mid_write(bench: Bench) -> AsyncIterator[None]:
    """Bytes are on their way, and their engine cannot say that they have arrived."""
    assert bench.mid_write is not None, "this engine cannot be held there"
    async with bench.mid_write.held(bench.prefill):
        yield


@contextlib.asynccontextmanager
async def before_admit(bench: Bench) -> AsyncIterator[None]:
    """Everything has arrived."""
    bench.prefill()
    await until(lambda: len(bench.it.prefill.leases) == 1)
    assert bench.reservation.state is ReservationState.READY
    yield


@contextlib.asynccontextmanager
async def after_admit(bench: Bench) -> AsyncIterator[None]:
    """The request generates."""
    num_adopted = len(bench.sink.adopted)
    bench.prefill()
    await until(lambda: len(bench.it.prefill.leases) == 1)
    await until(lambda: len(bench.sink.adopted) > num_adopted)
    assert bench.reservation.state is ReservationState.RUNNING
    yield
