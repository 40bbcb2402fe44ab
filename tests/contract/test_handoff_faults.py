"""Writes that go wrong as planned, on every engine: each hand-off ends whole or not at all, never with other rows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from common.errors import ServingError, TransferFailed
from common.rpc.status import error_of_call
from common.transfer.engine import TransferEngine, TransferId
from common.transfer.faults import FaultKind, FaultPlan
from common.transfer.faulty_engine import FaultyEngine
from common.transfer.memory import PoolMemory
from common.types import RequestContext
from tests.support import engines
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.figures import figure
from tests.support.handoff_cluster import PATIENT, Cluster, DecodeStream, a_context, cluster
from tests.support.small_cache import small_layout
from tests.support.waiting import WAIT_S

NUM_TOKENS = 60
"""Computed in one step, so that a hand-off is one write, and two when everything is sent again."""


class HastyEngine(FaultyEngine):
    """Time flies for writes that will never be over, and for no others: a busy machine has the time it needs."""

    async def poll(self, transfer: TransferId, *, timeout_s: float) -> bool:
        num_bytes = sum(r.length for r in self._writes[transfer].ranges)
        assert timeout_s == PATIENT.write_timeout_s(num_bytes), "another time than is configured"
        fault = self._writes[transfer].fault
        is_endless = fault is not None and fault.kind in (FaultKind.DROP, FaultKind.STALL)
        return await super().poll(transfer, timeout_s=0.2 if is_endless else timeout_s)


@dataclass(kw_only=True)
class Drill:
    """A pair of workers whose writes go wrong as planned."""

    it: Cluster
    sink: FakeEngine
    faulty: FaultyEngine
    slept: list[float]
    num_begun: int = 0

    async def begin(self) -> tuple[RequestContext, DecodeStream, Any]:
        """A request that is admitted, and its prefill call."""
        self.num_begun += 1
        number = self.num_begun
        context = a_context(NUM_TOKENS, request_id=f"r{number}", first=number * 10)
        stream = self.it.stream()
        reserved = await self.it.reserve(context)
        await stream.admit(context, reserved)
        return context, stream, self.it.start_prefill(context, reserved)

    async def require_whole(self) -> Any:
        """The next hand-off brings its own rows and nothing else; returns how it was done."""
        num_adopted = len(self.sink.adopted)
        context, stream, call = await self.begin()
        events = [event async for event in call]
        await stream.next("admitted")
        await self.it.until(lambda: len(self.sink.adopted) == num_adopted + 1)
        assert self.sink.wrong_rows == []
        await stream.abort(context)
        await stream.skip_to("finished")
        return events[-1].handoff_done

    async def require_failed(self) -> ServingError:
        """The next hand-off fails on both sides and runs nowhere; its error at prefill."""
        num_adopted = len(self.sink.adopted)
        context, stream, call = await self.begin()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        error = error_of_call(caught.value, peer="prefill")
        assert isinstance(error, TransferFailed)
        # What the router does then. Decode may have heard of it from prefill before.
        await stream.abort(context)
        await self.it.until(lambda: len(self.it.decode.reservations) == 0)
        assert len(self.sink.adopted) == num_adopted
        return error


@contextlib.asynccontextmanager
async def drill(engine: str, faults: str) -> AsyncIterator[Drill]:
    layout = small_layout()
    sink = FakeEngine(layout, draft_length=7)
    faulty: list[HastyEngine] = []
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    def wrap(inner: TransferEngine, memory: PoolMemory) -> HastyEngine:
        plan = FaultPlan.parse(faults)
        faulty.append(HastyEngine(inner, plan, memory, sleep=sleep))
        return faulty[-1]

    with engines.using(engine, wrap):
        async with cluster(loaded(FakeEngine(layout)), loaded(sink)) as it:
            running = Drill(it=it, sink=sink, faulty=faulty[0], slept=slept)
            yield running
            await it.prefill.quarantine.ask_all()
            await it.require_clean()
            # Whoever uses the memory next finds only its own rows.
            for _ in range(3):
                await running.require_whole()
            await it.require_clean()


every_engine = pytest.mark.parametrize("engine", engines.ALL)


@every_engine
async def test_a_write_that_fails_fails_its_request_on_both_sides(engine: str) -> None:
    async with drill(engine, "fail:1") as it:
        assert "write 1 failed as planned" in (await it.require_failed()).message


@every_engine
async def test_a_byte_that_arrives_altered_is_sent_once_more(engine: str) -> None:
    async with drill(engine, "corrupt:1") as it:
        done = await it.require_whole()
        assert it.faulty.num_writes == 2
        assert it.it.decode.intake.counts["digest_mismatches"] == 1
        registry = it.it.decode.metrics.registry
        assert figure(registry, "dspark_kv_digest_mismatches_total") == 1
        labels = {"peer": it.it.prefill_address, "region": "window"}
        assert figure(registry, "dspark_kv_digest_mismatches_total", **labels) == 1
        assert done.num_bytes > 0


@every_engine
async def test_a_byte_that_arrives_altered_twice_fails_the_request(engine: str) -> None:
    async with drill(engine, "corrupt:1,corrupt:2") as it:
        assert "arrived altered 2 times" in (await it.require_failed()).message
        assert it.it.decode.quarantine.num_pages == 0


@every_engine
async def test_a_completion_that_is_lost_fails_the_request_in_time(engine: str) -> None:
    async with drill(engine, "drop:1") as it:
        assert "did not reach" in (await it.require_failed()).message


@every_engine
async def test_a_write_that_arrives_twice_is_no_other_than_one(engine: str) -> None:
    async with drill(engine, "duplicate:1") as it:
        await it.require_whole()
        assert it.it.decode.intake.counts["digest_mismatches"] == 0


@every_engine
async def test_a_write_that_begins_late_is_waited_for(engine: str) -> None:
    async with drill(engine, "delay:1:7") as it:
        await it.require_whole()
        assert it.slept == [7.0]


@every_engine
async def test_a_write_that_does_not_end_lands_at_last_in_nobodys_memory(engine: str) -> None:
    """It is given up, cannot be proven to have stopped for a while, and arrives after all; requests run all the time."""
    async with drill(engine, "stall:1:3") as it:
        await it.require_failed()
        prefill, decode = it.it.prefill.quarantine, it.it.decode.quarantine
        is_one_sided = engine in engines.ONE_SIDED
        assert prefill.num_pages == 1
        assert bool(decode.num_pages) == is_one_sided
        await it.require_whole()
        async with asyncio.timeout(WAIT_S):
            while prefill.num_pages:
                await prefill.ask_all()
        assert decode.num_pages == 0


async def test_a_process_that_is_to_die_does_so_in_the_middle_of_its_hand_off() -> None:
    async with drill("direct", "") as it:
        has_died = asyncio.Event()
        it.faulty._plan = FaultPlan.parse("die:1")
        it.faulty._die = has_died.set
        _, stream, call = await it.begin()
        await asyncio.wait_for(has_died.wait(), WAIT_S)
        call.cancel()
        await stream.skip_to("failed")
