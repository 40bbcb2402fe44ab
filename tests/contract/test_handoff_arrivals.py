"""Rows are digested when they have arrived, not when all have: what is announced, checked and refused."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc.aio
import pytest
import xxhash

from common.errors import CapabilityRefused, InvalidRequest, RequestNotFound, ServingError
from common.rpc.status import error_of_call
from common.transfer.convert import key_to_pb
from common.transfer.digest import rows_bytes
from common.transfer.engine import TransferEngine
from common.transfer.faults import FaultPlan
from common.transfer.faulty_engine import FaultyEngine
from common.transfer.manifest import ManifestEntry
from common.transfer.memory import PoolMemory
from common.transfer.plan import live_rows
from common.types import RequestContext
from dspark.v1 import cache_pb2, handoff_service_pb2
from services.decode.arrivals import Arrivals
from services.decode.incoming import Incoming
from tests.support import engines
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.handoff_cluster import PATIENT, Cluster, DecodeStream, a_context, cluster
from tests.support.small_cache import small_layout
from tests.support.waiting import WAIT_S

NUM_TOKENS = 300
CHATTY = replace(PATIENT, announced_bytes=1)


def fake_engines() -> tuple[FakeEngine, FakeEngine]:
    layout = small_layout()
    source = FakeEngine(layout, draft_length=5, num_pages=24)
    return source, FakeEngine(layout, draft_length=7, num_pages=32)


def incoming(it: Cluster) -> Incoming | None:
    """The only hand-off that decode receives."""
    known: dict[str, Incoming] = cast(Any, it.decode.intake)._incoming
    return next(iter(known.values()), None)


def digested_bytes(it: Cluster) -> int:
    """Of the only hand-off, what decode has taken in."""
    known = incoming(it)
    if known is None or known.check.locked():
        return 0
    return rows_bytes(cast(Any, it.decode.intake)._memory, cast(Any, known.arrivals)._taken)


@dataclass(slots=True, kw_only=True)
class Digested:
    """A prefill whose rows decode has digested, and whose first token waits for `sample`."""

    it: Cluster
    sink: FakeEngine
    stream: DecodeStream
    call: Any
    sample: Callable[[], None]


@contextlib.asynccontextmanager
async def digested(*, has_drafter_state: bool = True) -> AsyncIterator[Digested]:
    source, sink = fake_engines()
    handoff = replace(CHATTY, sends_drafter_state=has_drafter_state)
    async with cluster(loaded(source), loaded(sink), handoff=handoff) as it:
        context, stream = a_context(NUM_TOKENS), it.stream()
        reserved = await it.reserve(context)
        await stream.admit(context, reserved)
        source.sampling_permits = threading.Semaphore(0)
        call = it.start_prefill(context, reserved)
        rows = live_rows(sink.pool.layout, NUM_TOKENS, has_drafter_state=has_drafter_state)
        await it.until(lambda: digested_bytes(it) == rows_bytes(sink.memory, rows))
        sample = source.sampling_permits.release
        yield Digested(it=it, sink=sink, stream=stream, call=call, sample=sample)


async def test_everything_is_digested_before_the_first_token_is_sampled() -> None:
    async with digested() as handoff:
        handoff.sample()
        events = [event async for event in handoff.call]
        assert events[-1].handoff_done.digest_s <= events[-1].handoff_done.handoff_s
        await handoff.stream.next("admitted")
        await handoff.it.until(lambda: len(handoff.sink.adopted) == 1)
        assert handoff.sink.wrong_rows == []


@pytest.mark.parametrize("has_drafter_state", [True, False])
async def test_nobody_waits_for_digests_of_rows_that_were_there_before(
    monkeypatch: pytest.MonkeyPatch, has_drafter_state: bool
) -> None:
    """Neither side has anything left to compute when the first token comes: a digest that was not taken yet would fail."""
    async with digested(has_drafter_state=has_drafter_state) as handoff:
        with monkeypatch.context() as patch:
            patch.setattr(xxhash, "xxh3_128", None)
            handoff.sample()
            events = [event.WhichOneof("event") async for event in handoff.call]
            assert events[-1] == "handoff_done"
        await handoff.stream.next("admitted")
        assert handoff.it.decode.intake.counts["digest_mismatches"] == 0


async def test_small_writes_are_not_announced() -> None:
    source, sink = fake_engines()
    async with cluster(loaded(source), loaded(sink), handoff=PATIENT) as it:
        context = a_context(NUM_TOKENS)
        reserved = await it.reserve(context)
        source.sampling_permits = threading.Semaphore(0)
        call = it.start_prefill(context, reserved)
        await it.until(lambda: source.num_computed == 1)
        assert digested_bytes(it) == 0
        source.sampling_permits.release()
        assert [event.WhichOneof("event") async for event in call][-1] == "handoff_done"


@pytest.mark.parametrize("number", [1, 2, 4])
async def test_a_byte_that_was_altered_on_the_way_is_found_although_its_rows_were_digested_early(
    number: int,
) -> None:
    """Of four writes: a page, the window's first rows, a page and more of the window, all that is left."""
    plan = FaultPlan.parse(f"corrupt:{number}")

    def wrap(engine: TransferEngine, memory: PoolMemory) -> TransferEngine:
        return FaultyEngine(engine, plan, memory)

    source, sink = fake_engines()
    with engines.using("direct", wrap):
        async with cluster(loaded(source), loaded(sink), handoff=CHATTY) as it:
            await one_mismatch_is_repaired(it, sink)


async def one_mismatch_is_repaired(it: Cluster, sink: FakeEngine) -> None:
    context, stream = a_context(NUM_TOKENS), it.stream()
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    await it.hand_over(context, reserved)
    await stream.next("admitted")
    await it.until(lambda: len(sink.adopted) == 1)
    assert it.decode.intake.counts["digest_mismatches"] == 1
    assert sink.wrong_rows == []


async def refusal(it: Cluster, entry: cache_pb2.ManifestEntry, **changes: Any) -> ServingError:
    known = incoming(it)
    assert known is not None
    request = handoff_service_pb2.ArrivedRequest(
        key=key_to_pb(replace(known.key, **changes.pop("key", {}))),
        capability=changes.pop("capability"),
        rows=[entry],
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await it.handoff_stub.Arrived(request, timeout=WAIT_S)
    return error_of_call(caught.value, peer="decode")


async def test_rows_that_cannot_have_arrived_are_refused_and_do_no_harm() -> None:
    source, sink = fake_engines()
    async with cluster(loaded(source), loaded(sink)) as it:
        context: RequestContext = a_context(NUM_TOKENS)
        reserved = await it.reserve(context)
        source.sampling_permits = threading.Semaphore(0)
        call = it.start_prefill(context, reserved)
        await it.until(lambda: source.num_computed == 1)
        capability = reserved.capability

        def entry(region: str, first_row: int, num_rows: int) -> cache_pb2.ManifestEntry:
            return cache_pb2.ManifestEntry(region=region, first_row=first_row, num_rows=num_rows)

        for wrong, words in (
            (entry("csb", 0, 1), "rows of csb were announced"),
            (entry("csa", 1, 1), "rows 1 to 1 of csa were announced; 0 to 74"),
            (entry("csa", 0, 0), "rows 0 to -1 of csa"),
            (entry("csa", 0, 76), "rows 0 to 75 of csa"),
            (entry("window", 0, 1), "rows 0 to 0 of window were announced; 172 to 299"),
        ):
            error = await refusal(it, wrong, capability=capability)
            assert isinstance(error, InvalidRequest) and words in error.message
        fine = entry("csa", 0, 1)
        assert isinstance(await refusal(it, fine, capability=b"x"), CapabilityRefused)
        other = await refusal(it, fine, capability=capability, key={"request_id": "other"})
        assert isinstance(other, RequestNotFound | CapabilityRefused)
        source.sampling_permits.release()
        assert [event.WhichOneof("event") async for event in call][-1] == "handoff_done"


async def test_arrivals_take_rows_in_any_pieces_and_begin_anew() -> None:
    source, _ = fake_engines()
    placement = source.memory.placement(page_ids=(0, 1, 2), slot=0)
    rows = live_rows(source.pool.layout, NUM_TOKENS, has_drafter_state=True)
    whole = await Arrivals(source.memory, placement, NUM_TOKENS).finish(rows)
    pieces = Arrivals(source.memory, placement, NUM_TOKENS)
    csa = [region.name for region in source.pool.layout.regions].index("csa")
    for first in range(0, len(rows[csa]), 25):
        await pieces.take([_entry("csa", first, 25)])
    pieces.begin_anew()
    await pieces.take([_entry("csa", 0, 30)])
    assert await asyncio.wait_for(pieces.finish(rows), WAIT_S) == whole


def _entry(region: str, first_row: int, num_rows: int) -> ManifestEntry:
    return ManifestEntry(region=region, first_row=first_row, num_rows=num_rows, num_bytes=0)
