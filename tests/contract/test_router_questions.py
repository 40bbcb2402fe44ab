"""What a client can ask a router besides generation, and what probes see of it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dspark.v1 import inference_service_pb2 as pb
from dspark.v1 import types_pb2
from tests.support.chat_tokenizer import ASSISTANT, BOS, END_THINK, EOS, USER, write_tokenizer
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.router_cluster import SEQUENCE, Cluster, cluster, collect, router_config
from tests.support.waiting import WAIT_S

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_the_model_is_described_as_workers_and_checkpoint_say(system: Cluster) -> None:
    info = await system.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info == pb.GetModelInfoResponse(
        model="tiny",
        max_context_length=256,
        vocab_size=300,
        eos_token_ids=[EOS],
        bos_token_id=BOS,
        draft_length=7,
        fingerprint="model-a",
        default_sampling=types_pb2.SamplingParams(temperature=1.0, top_k=0, top_p=1.0),
    )


async def test_a_chat_is_tokenized_as_generate_would(system: Cluster) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="the cat")])
    ids = (await system.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
    assert [*ids[:2], *ids[-2:]] == [BOS, USER, ASSISTANT, END_THINK]


async def test_text_survives_tokenize_and_detokenize(system: Cluster) -> None:
    text = "the cat — 猫"
    plain = await system.stub.Tokenize(pb.TokenizeRequest(text=text))
    begun = await system.stub.Tokenize(pb.TokenizeRequest(text=text, add_special_tokens=True))
    assert list(begun.token_ids) == [BOS, *plain.token_ids]
    shown = await system.stub.Detokenize(pb.DetokenizeRequest(token_ids=begun.token_ids))
    assert shown.text == text
    kept = await system.stub.Detokenize(
        pb.DetokenizeRequest(token_ids=begun.token_ids, keep_special_tokens=True)
    )
    assert kept.text == "<｜begin▁of▁sentence｜>" + text


async def test_workers_are_listed_with_role_and_state(system: Cluster) -> None:
    workers = (await system.stub.ListWorkers(pb.ListWorkersRequest())).workers
    assert [(w.role, w.state, w.generation) for w in workers] == [
        (pb.WORKER_ROLE_PREFILL, pb.WORKER_STATE_READY, "prefill-1"),
        (pb.WORKER_ROLE_DECODE, pb.WORKER_STATE_READY, "decode-1"),
    ]


async def test_the_server_describes_itself(system: Cluster) -> None:
    info = await system.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info.role == "router"
    assert info.uptime_s > 0
    assert info.queued_requests == info.running_requests == 0
    assert info.details["model"] == "tiny"


async def test_the_server_says_how_state_travels_from_every_prefill_worker(tmp_path: Path) -> None:
    prefill = FakePrefill(SEQUENCE)
    way, drafter = "transfer_engine decode:1", "drafter_state decode:1"
    prefill.details = {
        way: "grpc (no nixl)",
        drafter: "not sent: decode has no drafter",
        "lease_handoffs": "3",
    }
    config = router_config(write_tokenizer(tmp_path))
    async with cluster(config, [prefill], [FakeDecode(SEQUENCE)]) as system:
        details = (await system.stub.GetServerInfo(pb.GetServerInfoRequest())).details
        workers = (await system.stub.ListWorkers(pb.ListWorkersRequest())).workers
        told = {name: value for name, value in details.items() if "decode:1" in name}
        assert told == {
            f"{workers[0].address} {way}": "grpc (no nixl)",
            f"{workers[0].address} {drafter}": "not sent: decode has no drafter",
        }
        assert not any("lease_handoffs" in name for name in details)


async def test_the_server_passes_on_what_its_workers_say_of_themselves(system: Cluster) -> None:
    workers = (await system.stub.GetServerInfo(pb.GetServerInfoRequest())).workers
    listed = (await system.stub.ListWorkers(pb.ListWorkersRequest())).workers
    assert {address: info.generation for address, info in workers.items()} == {
        worker.address: worker.generation for worker in listed
    }
    for worker in listed:
        info = workers[worker.address]
        assert (info.mesh.dp, info.mesh.tp, info.mesh.num_ranks) == (2, 4, 8)
        assert [(memory.rank, memory.claims[0].owner) for memory in info.memory] == [(3, "target")]


async def test_health_is_per_service_and_apart_for_liveness(system: Cluster) -> None:
    health = health_pb2_grpc.HealthStub(system.channel)
    for name in ("", "readiness", "liveness", "dspark.v1.InferenceService"):
        response = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert response.status == SERVING, name


async def test_a_router_without_workers_is_alive_but_not_ready(system: Cluster) -> None:
    health = health_pb2_grpc.HealthStub(system.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service="readiness"))
    statuses = aiter(watch)
    async with asyncio.timeout(WAIT_S):
        assert (await anext(statuses)).status == SERVING
        system.decode.draining = True
        assert (await anext(statuses)).status == NOT_SERVING
        alive = await health.Check(health_pb2.HealthCheckRequest(service="liveness"))
        assert alive.status == SERVING
        system.decode.draining = False
        assert (await anext(statuses)).status == SERVING
    watch.cancel()


async def test_the_trailer_names_the_request_whether_it_went_well_or_not(system: Cluster) -> None:
    for request in (
        pb.GenerateRequest(text="cat", request_id="mine", stop=types_pb2.StopParams(max_tokens=1)),
        pb.GenerateRequest(text="cat", request_id="mine", model="gpt"),
    ):
        call = system.stub.Generate(request)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await collect(call)
        assert ("x-request-id", "mine") in tuple(await call.trailing_metadata())


async def test_reflection_lists_the_services(system: Cluster) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(system.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    response = await call.read()
    call.cancel()
    names = {service.name for service in response.list_services_response.service}
    assert {"dspark.v1.InferenceService", "grpc.health.v1.Health"} <= names
