"""Which workers a request is given to, and which it is passed by; over sockets, with scripted workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from common.errors import CapacityExhausted, ServingError
from dspark.v1 import inference_service_pb2 as pb
from tests.support.chat_tokenizer import write_tokenizer
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.router_cluster import (
    SEQUENCE,
    STOP,
    Cluster,
    cluster,
    collect,
    generate_request,
    router_config,
    tokens_of,
    workers_seen,
)


async def test_a_full_decode_worker_is_passed_by(pairs: Cluster) -> None:
    pairs.decodes[0].refusals = [CapacityExhausted("full")]
    received = await collect(pairs.stub.Generate(generate_request(stop=STOP)))
    assert tokens_of(received) == SEQUENCE[:30]
    assert len(pairs.decodes[1].admits) == 1
    assert received[-1].completion.route.replacements == 0


async def test_a_decode_worker_that_fails_at_once_is_passed_by(pairs: Cluster) -> None:
    pairs.decodes[0].refusals = [ServingError("a bug")]
    received = await collect(pairs.stub.Generate(generate_request(stop=STOP)))
    assert tokens_of(received) == SEQUENCE[:30]
    assert len(pairs.decodes[1].admits) == 1


async def test_requests_that_come_together_are_spread(pairs: Cluster) -> None:
    for decode in pairs.decodes:
        decode.reserve_gate.clear()
    for prefill in pairs.prefills:
        prefill.start_gate.clear()
    calls = [collect(pairs.stub.Generate(generate_request(stop=STOP))) for _ in range(8)]
    together = asyncio.gather(*calls)
    for decode in pairs.decodes:
        await decode.seen.until(lambda d=decode: len(d.reserves) == 4)  # type: ignore[misc]
    for decode in pairs.decodes:
        decode.reserve_gate.set()
    for prefill in pairs.prefills:
        await prefill.seen.until(lambda p=prefill: len(p.prefills) == 4)  # type: ignore[misc]
    for prefill in pairs.prefills:
        prefill.start_gate.set()
    await together


async def test_a_worker_with_another_model_is_never_used(tmp_path: Path) -> None:
    config = router_config(write_tokenizer(tmp_path))
    stranger = FakePrefill(SEQUENCE)
    stranger.fingerprint = "model-b"
    async with cluster(config, [stranger, FakePrefill(SEQUENCE)], [FakeDecode(SEQUENCE)]) as system:
        for _ in range(3):
            await collect(system.stub.Generate(generate_request(stop=STOP)))
        assert not stranger.prefills


async def test_workers_that_were_all_replaced_by_another_model_serve_that_one(
    system: Cluster,
) -> None:
    for worker in (system.decode, system.prefill):
        worker.fingerprint, worker.generation = "model-b", "next"
    await workers_seen(
        system.stub, lambda workers: all(worker.generation == "next" for worker in workers)
    )
    info = await system.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.fingerprint == "model-b"
    received = await collect(system.stub.Generate(generate_request(stop=STOP)))
    assert tokens_of(received) == SEQUENCE[:30]
