"""A request that cannot be served is refused by name before it costs a worker anything, and not while waiting may help; over
sockets, with scripted workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import CapacityExhausted, ContractMismatch
from dspark.v1 import inference_service_pb2 as pb
from dspark.v1 import types_pb2
from services.router import QueueConfig
from tests.support.chat_tokenizer import write_tokenizer
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.router_cluster import (
    SEQUENCE,
    STOP,
    Cluster,
    cluster,
    collect,
    error_of,
    generate_request,
    router_config,
    tokens_of,
    workers_seen,
)


async def test_with_all_full_a_request_waits_for_room(system: Cluster) -> None:
    system.decode.refusals = [CapacityExhausted("full")] * 2
    received = await collect(system.stub.Generate(generate_request(stop=STOP)))
    assert tokens_of(received) == SEQUENCE[:30]
    assert len(system.decode.reserves) == 3


async def test_a_request_waits_for_a_full_worker_whatever_others_refuse_it_with(
    pairs: Cluster,
) -> None:
    full, other = pairs.decodes
    full.refusals = [CapacityExhausted("full")]
    other.refusals = [ContractMismatch("another model")] * 1000
    received = await collect(pairs.stub.Generate(generate_request(stop=STOP)))
    assert tokens_of(received) == SEQUENCE[:30]
    assert len(full.admits) == 1


async def test_and_is_refused_when_none_comes(tmp_path: Path) -> None:
    config = replace(
        router_config(write_tokenizer(tmp_path)), queue=QueueConfig(queue_timeout_s=0.3)
    )
    async with cluster(config, [FakePrefill(SEQUENCE)], [FakeDecode(SEQUENCE)]) as system:
        system.decode.refusals = [CapacityExhausted("no pages")] * 1000
        error = await error_of(system.stub.Generate(generate_request(stop=STOP)))
        assert error.reason == "CAPACITY_EXHAUSTED"
        assert error.retry_after_s is not None
        assert not system.prefill.prefills, "refused before any prefill work is spent"


async def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    config = replace(router_config(write_tokenizer(tmp_path)), queue=QueueConfig(max_queued=1))
    async with cluster(config, [FakePrefill(SEQUENCE)], [FakeDecode(SEQUENCE)]) as system:
        system.decode.refusals = [CapacityExhausted("full")] * 1000
        waiting = system.stub.Generate(generate_request(stop=STOP))
        await system.decode.seen.until(lambda: bool(system.decode.reserves))
        error = await error_of(system.stub.Generate(generate_request(stop=STOP)))
        assert error.reason == "QUEUE_FULL"
        assert error.retry_after_s is not None and error.retry_after_s > 0
        system.decode.refusals = []
        await collect(waiting)


@pytest.mark.parametrize(
    ("request_pb", "reason"),
    [
        (generate_request(model="gpt"), "MODEL_NOT_FOUND"),
        (generate_request(num_prompt=256), "CONTEXT_LENGTH_EXCEEDED"),
        (
            generate_request(num_prompt=200, stop=types_pb2.StopParams(max_tokens=57)),
            "CONTEXT_LENGTH_EXCEEDED",
        ),
        (generate_request(sampling=types_pb2.SamplingParams(top_p=1.5)), "INVALID_PARAMETER"),
        (generate_request(sampling=types_pb2.SamplingParams(logprobs=21)), "INVALID_PARAMETER"),
        (generate_request(stop=types_pb2.StopParams(max_tokens=0)), "INVALID_PARAMETER"),
        (generate_request(num_prompt=0), "INVALID_PARAMETER"),
        (pb.GenerateRequest(), "INVALID_PARAMETER"),
        (pb.GenerateRequest(text="x" * 1_000_000), "CONTEXT_LENGTH_EXCEEDED"),
        (pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[300])), "INVALID_PARAMETER"),
    ],
)
async def test_a_bad_request_costs_no_worker_anything(
    system: Cluster, request_pb: pb.GenerateRequest, reason: str
) -> None:
    call = system.stub.Generate(request_pb)
    assert (await error_of(call)).reason == reason
    assert not system.decode.reserves and not system.prefill.prefills


async def test_without_workers_the_role_that_is_missing_is_named(system: Cluster) -> None:
    system.prefill.draining = True
    await workers_seen(system.stub, lambda workers: workers[0].state == pb.WORKER_STATE_DRAINING)
    error = await error_of(system.stub.Generate(generate_request(stop=STOP)))
    assert error.reason == "NO_READY_WORKERS"
    assert error.metadata["role"] == "prefill"
