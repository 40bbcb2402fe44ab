"""A worker that is lost, restarted or stalls costs time, never a token; over sockets, with scripted workers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from common.errors import TransferFailed
from dspark.v1 import decode_service_pb2
from tests.support.fake_workers import FakeDecode
from tests.support.router_cluster import (
    SEQUENCE,
    STOP,
    Cluster,
    collect,
    error_of,
    generate_request,
    tokens_of,
    workers_seen,
)


async def test_a_lost_decode_stream_loses_and_repeats_nothing(system: Cluster) -> None:
    system.decode.round_gate.clear()
    call = system.stub.Generate(generate_request(stop=STOP))
    responses = aiter(call)
    received = [await anext(responses)]
    system.decode.round_gate.set()
    received.append(await anext(responses))
    received.append(await anext(responses))
    system.decode.break_stream()
    received += [response async for response in responses]
    assert tokens_of(received) == SEQUENCE[:30]
    assert received[-1].completion.route.replacements == 1
    again = system.prefill.handoffs[0].context
    assert again.epoch == 1
    committed = list(again.committed_token_ids)
    assert committed == SEQUENCE[: len(committed)] and len(committed) >= 7


async def test_another_decode_worker_takes_over(pairs: Cluster) -> None:
    pairs.decodes[0].round_gate.clear()
    call = pairs.stub.Generate(generate_request(stop=STOP))
    first = await anext(aiter(call))
    pairs.decodes[0].break_stream()
    received = [first, *await collect(call)]
    assert tokens_of(received) == SEQUENCE[:30]
    assert [a.epoch for a in pairs.decodes[1].admits] == [1]


async def test_a_prefill_worker_that_dies_after_the_handoff_is_not_missed(system: Cluster) -> None:
    system.prefill.done_gate.clear()
    call = system.stub.Generate(generate_request(stop=STOP))
    responses = aiter(call)
    received = [await anext(responses), await anext(responses)]
    system.decode.round_gate.clear()
    system.prefill.generation = "prefill-2"
    await workers_seen(system.stub, lambda workers: workers[0].generation == "prefill-2")
    system.decode.round_gate.set()
    received += [response async for response in responses]
    assert tokens_of(received) == SEQUENCE[:30]
    assert received[-1].completion.route.replacements == 0


async def test_a_restarted_decode_worker_gets_its_requests_again(system: Cluster) -> None:
    system.decode.round_gate.clear()
    call = system.stub.Generate(generate_request(stop=STOP))
    first = await anext(aiter(call))
    await system.decode.seen.until(lambda: bool(system.decode.admits))
    system.decode.generation = "decode-2"
    await system.decode.seen.until(lambda: len(system.decode.admits) == 2)
    system.decode.round_gate.set()
    assert tokens_of([first, *await collect(call)]) == SEQUENCE[:30]


async def test_after_tokens_were_shown_the_stream_is_interrupted(system: Cluster) -> None:
    system.decode.round_gate.clear()
    call = system.stub.Generate(generate_request(stop=STOP))
    await anext(aiter(call))
    await system.decode.seen.until(lambda: bool(system.decode.admits))
    system.prefill.failures = [TransferFailed("the wire was cut")] * 9
    system.decode.break_stream()
    error = await error_of(call)
    assert error.reason == "STREAM_INTERRUPTED"
    assert error.metadata["tokens_emitted"] == "1"
    assert error.metadata["cause"] == "KV_TRANSFER_FAILED"


async def test_a_decode_worker_that_stalls_is_left(quick_pairs: Cluster) -> None:
    stalled, other = quick_pairs.decodes
    stalled.round_gate.clear()
    call = quick_pairs.stub.Generate(generate_request(stop=STOP))
    first = await anext(aiter(call))
    stalled.info_gate.clear()
    received = [first, *await collect(call)]
    assert tokens_of(received) == SEQUENCE[:30]
    assert other.admits
    await stalled.seen.until(lambda: stalled.num_streams_ended == 1)
    stalled.info_gate.set()


async def test_a_prefill_worker_that_stalls_is_left(quick_pairs: Cluster) -> None:
    stalled, other = quick_pairs.prefills
    stalled.start_gate.clear()
    call = quick_pairs.stub.Generate(generate_request(stop=STOP))
    await stalled.seen.until(lambda: bool(stalled.prefills))
    stalled.info_gate.clear()
    assert tokens_of(await collect(call)) == SEQUENCE[:30]
    assert other.prefills
    await stalled.seen.until(lambda: bool(stalled.cancelled))
    stalled.info_gate.set()


async def test_streams_that_break_at_random_cost_no_token(quick_pairs: Cluster) -> None:
    """Every tenth event breaks a stream under 12 requests; each token still comes once and in order."""
    rng = random.Random(20260730)
    for decode in quick_pairs.decodes:
        decode.mangle = breaking_at_random(decode, rng)
    calls = [
        collect(quick_pairs.stub.Generate(generate_request(num_prompt=n, stop=STOP)))
        for n in range(1, 13)
    ]
    for received in await asyncio.gather(*calls):
        assert tokens_of(received) == SEQUENCE[:30]


async def test_a_missing_round_is_noticed_and_made_good(system: Cluster) -> None:
    dropped = False

    def without_the_second_round(event: object) -> list[object]:
        nonlocal dropped
        is_second = event.WhichOneof("event") == "verified" and event.verified.round == 2  # type: ignore[attr-defined]
        if is_second and not dropped:
            dropped = True
            return []
        return [event]

    system.decode.mangle = without_the_second_round  # type: ignore[assignment]
    received = await collect(system.stub.Generate(generate_request(stop=STOP)))
    assert tokens_of(received) == SEQUENCE[:30]
    assert received[-1].completion.route.replacements == 1


def breaking_at_random(
    decode: FakeDecode, rng: random.Random
) -> Callable[[decode_service_pb2.DecodeEvent], list[decode_service_pb2.DecodeEvent]]:
    def mangle(event: decode_service_pb2.DecodeEvent) -> list[decode_service_pb2.DecodeEvent]:
        if rng.random() < 0.1:
            decode.break_stream()
            return []
        return [event]

    return mangle
