"""A worker ends in bounded time whatever its engine does."""

from __future__ import annotations

import asyncio
import threading

import grpc.aio
import pytest

from common.engine import thread as engine_thread
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.handoff_cluster import a_context, cluster
from tests.support.small_cache import small_layout
from tests.support.waiting import WAIT_S

LAYOUT = small_layout()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Never opened while a worker lives; steps wait for it."""
    monkeypatch.setattr(engine_thread, "STOP_TIMEOUT_S", 0.05)
    return threading.Semaphore(0)


async def test_a_prefill_worker_whose_step_does_not_end_ends(gate: threading.Semaphore) -> None:
    source = FakeEngine(LAYOUT)
    async with cluster(loaded(source), loaded(FakeEngine(LAYOUT))) as it:
        source.permits = gate
        context = a_context(130)
        call = it.start_prefill(context, await it.reserve(context))
        reading = asyncio.create_task(call.read())
        await it.until(lambda: it.prefill.engine.busy_s > 0)
        await asyncio.wait_for(it.prefill.close(), WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError, match="the prefill worker stops"):
            await reading
        assert it.prefill.num_jobs == 0
    gate.release(1000)


async def test_a_decode_worker_whose_step_does_not_end_ends(gate: threading.Semaphore) -> None:
    sink = FakeEngine(LAYOUT)
    async with cluster(loaded(FakeEngine(LAYOUT)), loaded(sink)) as it:
        context, stream = a_context(130), it.stream()
        reserved = await it.reserve(context)
        sink.permits = gate
        await stream.admit(context, reserved)
        await it.hand_over(context, reserved)
        await stream.next("admitted")
        await it.until(lambda: it.decode.engine.busy_s > 0)
        await asyncio.wait_for(it.decode.close(), WAIT_S)
        assert (await stream.next("failed")).reason == "WORKER_LOST"
        assert it.decode.reservations.is_empty
    gate.release(1000)
