"""A pair of workers with their engines at hand. Knows what is exact and when all is free; not how requests end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

from common.types import RequestContext
from services.prefill.config import HandoffConfig
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.handoff_cluster import Cluster, DecodeStream, a_context, cluster
from tests.support.small_cache import small_layout


class Pair:
    """The cluster with its engines at hand."""

    def __init__(self, it: Cluster, source: FakeEngine, sink: FakeEngine) -> None:
        self.it, self.source, self.sink = it, source, sink


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


async def running(
    pair: Pair, stream: DecodeStream, request_id: str = "r"
) -> tuple[RequestContext, Any]:
    """A request that was admitted whole, and its reservation."""
    context = a_context(200, request_id=request_id)
    reserved = await pair.it.reserve(context)
    await stream.admit(context, reserved)
    await pair.it.hand_over(context, reserved)
    await stream.next("admitted")
    return context, reserved


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


def close_gate(engine: FakeEngine) -> threading.Semaphore:
    """The permits without which the engine takes no further step."""
    engine.permits = threading.Semaphore(0)
    return engine.permits


def open_gate(engine: FakeEngine) -> None:
    permits, engine.permits = engine.permits, None
    if permits is not None:
        permits.release(1000)
