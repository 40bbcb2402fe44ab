"""Hand-offs that are given up, at every phase and by everybody, fifty times each with every engine: all memory comes back,
and who uses it next finds only its own rows."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from unittest import mock

import grpc.aio
import pytest

from common.engine.memory import RequestMemory
from common.errors import WorkerLost
from common.transfer.engine import TransferEngine
from common.transfer.memory import PoolMemory
from common.types import RequestContext
from services.decode.reservations import ReservationState
from services.prefill.handoff import Handoff
from tests.support import engines
from tests.support.engines import HeldEngine
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.handoff_cluster import Cluster, DecodeStream, a_context, cluster
from tests.support.small_cache import small_layout

TIMES = 50
NUM_TOKENS = 140


class Bench:
    """A pair of workers and what stands still in it."""

    def __init__(self, it: Cluster, source: FakeEngine, sink: FakeEngine, held: HeldEngine) -> None:
        self.it, self.source, self.sink, self.held = it, source, sink, held
        self.stream: DecodeStream = it.stream()
        self.context: RequestContext
        self.reserved: Any
        self.call: Any = None

    @property
    def reservation(self) -> Any:
        return self.it.decode.reservations.by_id(self.reserved.reservation_id)

    @property
    def num_computed(self) -> int:
        job = self.it.prefill._jobs.get(self.context.request_id)
        return 0 if job is None else job.num_computed

    async def begin(self, number: int, *, is_admitted: bool) -> None:
        self.context = a_context(NUM_TOKENS, request_id=f"r{number}", first=number % 200 + 1)
        self.reserved = await self.it.reserve(self.context)
        self.call = None
        if is_admitted:
            await self.stream.admit(self.context, self.reserved)

    def prefill(self) -> None:
        self.call = self.it.start_prefill(self.context, self.reserved)

    def cancel_prefill(self) -> None:
        if self.call is not None:
            self.call.cancel()

    async def abort_decode(self) -> None:
        await self.stream.abort(self.context, self.reserved.reservation_id)

    async def settle(self) -> None:
        """What was not told to somebody, time tells; then everything is free, on both sides, within a second."""
        for reservation in self.it.decode.reservations.all():
            reservation.expires_at = 0.0
        self.it.decode.expire()
        if self.call is not None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                async for _ in self.call:
                    pass
        await self.it.require_clean()
        assert self.it.decode.quarantine.num_pages == self.it.prefill.quarantine.num_pages == 0

    async def require_exact(self) -> None:
        """The next requests take the same pages and find their own rows."""
        for number in range(3):
            context = a_context(NUM_TOKENS, request_id=f"after{number}", first=220 + number)
            reserved = await self.it.reserve(context)
            stream = self.it.stream()
            await stream.admit(context, reserved)
            await self.it.hand_over(context, reserved)
            await stream.next("admitted")
            await stream.commit(context, 0, context.length + 1, finish=True)
            await stream.skip_to("finished")
        assert self.sink.wrong_rows == []
        await self.it.require_clean()


@contextlib.asynccontextmanager
async def benched(engine: str) -> AsyncIterator[Bench]:
    layout = small_layout(window=16)
    source, sink = FakeEngine(layout), FakeEngine(layout, draft_length=7)
    wrapped: list[HeldEngine] = []

    def wrap(inner: TransferEngine, memory: PoolMemory) -> HeldEngine:
        wrapped.append(HeldEngine(inner))
        return wrapped[-1]

    with engines.using(engine, wrap):
        async with cluster(loaded(source), loaded(sink), max_queued=100) as it:
            yield Bench(it, source, sink, wrapped[0])


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
    await bench.it.until(lambda: room.num_queued == 1)
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
        await has_answered.wait()
        yield
        may_read.set()


@contextlib.asynccontextmanager
async def mid_prefill(bench: Bench) -> AsyncIterator[None]:
    """A page is computed and being sent, and the engine is in a step."""
    bench.source.permits = permits = threading.Semaphore(2)
    bench.prefill()
    await bench.it.until(lambda: bench.num_computed == 128)
    yield
    bench.source.permits = None
    permits.release(1000)


@contextlib.asynccontextmanager
async def mid_transfer(bench: Bench) -> AsyncIterator[None]:
    """Half of a write has arrived."""
    bench.held.hold()
    bench.prefill()
    await bench.held.is_half_way.wait()
    yield
    bench.held.release()


@contextlib.asynccontextmanager
async def before_admit(bench: Bench) -> AsyncIterator[None]:
    """Everything has arrived."""
    bench.prefill()
    await bench.it.until(lambda: bench.reservation.state is not ReservationState.RECEIVING)
    await bench.it.until(lambda: len(bench.it.prefill.leases) == 1)
    yield


@contextlib.asynccontextmanager
async def after_admit(bench: Bench) -> AsyncIterator[None]:
    """The request generates."""
    bench.prefill()
    await bench.it.until(lambda: len(bench.it.prefill.leases) == 1)
    yield


Who = Callable[[Bench], Awaitable[None]]


async def client(bench: Bench) -> None:
    """Its router ends both legs."""
    bench.cancel_prefill()
    await bench.abort_decode()


async def client_unheard_by_decode(bench: Bench) -> None:
    bench.cancel_prefill()


async def client_unheard_by_prefill(bench: Bench) -> None:
    await bench.abort_decode()


async def prefill(bench: Bench) -> None:
    for job in list(bench.it.prefill._jobs.values()):
        job.cancel(WorkerLost("given up here"))


async def decode(bench: Bench) -> None:
    bench.it.decode.end(bench.reservation, WorkerLost("given up here"))


EVERYBODY: tuple[Who, ...] = (
    client,
    client_unheard_by_decode,
    client_unheard_by_prefill,
    prefill,
    decode,
)
CASES: dict[Phase, tuple[Who, ...]] = {
    queued: EVERYBODY,
    reserved: (client, client_unheard_by_decode, decode),
    negotiating: EVERYBODY,
    mid_prefill: EVERYBODY,
    mid_transfer: EVERYBODY,
    # Prefill is done with it.
    before_admit: (client, client_unheard_by_decode, decode),
    after_admit: (client, decode),
}


def cases() -> Iterator[tuple[str, Phase]]:
    for phase in CASES:
        # No engine has heard of a request that waits.
        names = ("grpc",) if phase in (queued, reserved) else engines.ALL
        yield from ((engine, phase) for engine in names)


@pytest.mark.parametrize(("engine", "phase"), list(cases()))
async def test_memory_comes_back_within_a_second_and_the_next_requests_are_exact(
    engine: str, phase: Phase
) -> None:
    async with benched(engine) as bench:
        for who in CASES[phase]:
            print(f"{TIMES} times by {who.__name__}")  # the last of these is the one that failed
            for number in range(TIMES):
                await bench.begin(number, is_admitted=phase is after_admit)
                async with phase(bench):
                    await who(bench)
                await bench.settle()
            await bench.require_exact()
