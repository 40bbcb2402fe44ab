"""Many requests at once that end wherever chance ends them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import grpc
import grpc.aio

from common.types import RequestContext
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.handoff_cluster import Cluster, DecodeStream, a_context, cluster
from tests.support.small_cache import small_layout

SEED = 20261129
NUM_LANES = 6
NUM_ROUNDS = 12
LIMIT_S = 300.0
"""A hundred times what it takes."""
OUTCOMES = ("finish", "abort", "cancel_prefill", "cut_stream", "leave_to_newer_epoch")


async def test_requests_that_end_anywhere_leave_nothing_behind_and_disturb_no_other() -> None:
    """72 requests on 4 prefill and 5 decode slots, each cut off at a random moment in one of five ways. Every row that the
    decode engine took over is looked at, so a write that lands in somebody else's page cannot hide."""
    print(f"seed {SEED}")
    layout = small_layout()
    source = FakeEngine(layout, num_pages=20, num_slots=4)
    sink = FakeEngine(layout, num_pages=24, num_slots=5, draft_length=7)
    async with cluster(loaded(source), loaded(sink), max_queued=64) as it:
        lanes = (lane(it, index, random.Random(SEED + index)) for index in range(NUM_LANES))
        outcomes = await asyncio.wait_for(asyncio.gather(*lanes), LIMIT_S)
        await it.require_clean()
        assert sink.wrong_rows == []
        assert sum(outcomes) > 0, "not one request ran to its end"
        assert not it.prefill.engine.has_crashed and not it.decode.engine.has_crashed


async def lane(it: Cluster, index: int, chance: random.Random) -> int:
    """One request after the other; returns how many ran to their ends."""
    num_finished = 0
    for number in range(NUM_ROUNDS):
        num_finished += await one(it, f"{index}-{number}", chance)
    return num_finished


async def one(it: Cluster, request_id: str, chance: random.Random) -> bool:
    outcome = chance.choice(OUTCOMES)
    context = a_context(
        chance.choice((1, 5, 127, 128, 129, 200, 256, 300)),
        request_id=request_id,
        first=chance.randrange(1, 200),
        max_tokens=9,
    )
    reserved = await reserve_once_there_is_room(it, context)
    stream = it.stream()
    await stream.admit(context, reserved)
    call = it.start_prefill(context, reserved)
    watching = asyncio.create_task(drain(call))
    if outcome == "finish":
        return await run_to_end(stream, context)
    await asyncio.sleep(chance.random() * 0.05)
    if outcome == "abort":
        await stream.abort(context)
    elif outcome == "cancel_prefill":
        call.cancel()
        await asyncio.sleep(chance.random() * 0.01)
        await stream.abort(context)
    elif outcome == "cut_stream":
        stream.call.cancel()
    else:
        newer = a_context(context.length, request_id=request_id, epoch=1)
        # Ends the older epoch at once, whose room may be another lane's before it is this one's again.
        again = await reserve_once_there_is_room(it, newer)
        await stream.abort(newer, again.reservation_id)
    await watching
    return False


async def reserve_once_there_is_room(it: Cluster, context: RequestContext) -> Any:
    while True:
        try:
            return await it.reserve(context)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
            await asyncio.sleep(0.005)


async def run_to_end(stream: DecodeStream, context: RequestContext) -> bool:
    await stream.next("admitted")
    length = context.length + 1
    while length < context.max_length:
        verified = await stream.next("verified")
        assert verified.base == length
        length += len(verified.token_ids)
        is_last = length == context.max_length
        await stream.commit(context, verified.round, length, finish=is_last)
    await stream.next("finished")
    return True


async def drain(call: Any) -> None:
    """Read a prefill to its end, whatever that is."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for _ in call:
            pass
