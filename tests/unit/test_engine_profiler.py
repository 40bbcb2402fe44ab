"""Recordings of an engine at work."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator

import pytest
import torch

from common.engine.profiler import StepProfiler
from common.engine.request import Request, Role, StepReport
from common.engine.thread import EngineThread
from common.errors import CapacityExhausted, NothingRecorded
from common.types import RequestId, SamplingParams
from services.decode.loop import run_decode_loop
from tests.support.fake_engine import FakeEngine
from tests.support.small_cache import small_layout

WAIT_S = 30.0


class Multiplying(FakeEngine):
    """Each step multiplies two matrices of a telling size."""

    def step(self, *arguments: object) -> StepReport:
        torch.ones(7, 11) @ torch.ones(11, 13)
        return super().step()


@pytest.fixture
async def thread() -> AsyncIterator[EngineThread[StepReport]]:
    engine = Multiplying(small_layout(), max_uncommitted_rounds=1000)
    thread = EngineThread(
        engine, run_decode_loop, on_report=lambda report: None, on_crash=lambda error: None
    )
    thread.start()
    yield thread
    await thread.stop()


def endless() -> Request:
    return Request(
        request_id=RequestId("r"),
        epoch=0,
        role=Role.GENERATE,
        tokens=[5, 6, 7],
        max_length=1000,
        sampling=SamplingParams(),
        slot=0,
        block_table=list(range(8)),
    )


async def test_it_shows_what_the_engines_thread_computed(thread: EngineThread[StepReport]) -> None:
    recording = asyncio.create_task(StepProfiler(thread).record(max_steps=5, max_seconds=WAIT_S))
    await asyncio.sleep(0)
    thread.add(endless())
    done = await asyncio.wait_for(recording, WAIT_S)
    assert done.num_steps >= 5
    assert 0 < done.seconds < WAIT_S
    events = json.loads(gzip.decompress(done.trace))["traceEvents"]
    shapes = [event["args"].get("Input Dims") for event in events if event["name"] == "aten::mm"]
    assert shapes.count([[7, 11], [11, 13]]) == done.num_steps


async def test_one_recording_at_a_time_and_the_next_one_after_it(
    thread: EngineThread[StepReport],
) -> None:
    profiler = StepProfiler(thread)
    first = asyncio.create_task(profiler.record(max_steps=1, max_seconds=WAIT_S))
    await asyncio.sleep(0)
    with pytest.raises(CapacityExhausted, match="a recording goes on already"):
        await profiler.record(max_steps=1, max_seconds=WAIT_S)
    thread.add(endless())
    assert (await asyncio.wait_for(first, WAIT_S)).num_steps >= 1
    await thread.remove(RequestId("r"))
    with pytest.raises(NothingRecorded, match=r"no step in 0\.01 s"):
        await profiler.record(max_steps=1, max_seconds=0.01)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_recording_that_is_given_up_leaves_the_engine_unrecorded(
    thread: EngineThread[StepReport], has_begun: bool
) -> None:
    profiler = StepProfiler(thread)
    recording = asyncio.create_task(profiler.record(max_steps=1, max_seconds=WAIT_S))
    await asyncio.sleep(0)
    if has_begun:
        await thread.call(lambda: None)  # comes after the recording's begin
    recording.cancel()
    with pytest.raises(asyncio.CancelledError):
        await recording
    thread.add(endless())
    assert (await profiler.record(max_steps=2, max_seconds=WAIT_S)).num_steps >= 2


async def test_a_trace_that_is_too_large_is_refused_with_both_numbers(
    thread: EngineThread[StepReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.engine.profiler.MAX_TRACE_BYTES", 10)
    thread.add(endless())
    with pytest.raises(CapacityExhausted, match="record fewer") as refused:
        await StepProfiler(thread).record(max_steps=1, max_seconds=WAIT_S)
    assert refused.value.metadata["limit"] == "10"
