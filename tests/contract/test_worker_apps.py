"""Prefill and decode workers as processes run them: start, health, what they say of themselves, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.errors import ConfigError, Draining
from common.rpc import convert
from common.rpc.channel import open_channel
from common.rpc.status import error_of_call
from common.transfer.config import TransferConfig
from dspark.v1 import decode_service_pb2, prefill_service_pb2
from dspark.v1.decode_service_pb2_grpc import DecodeServiceStub
from dspark.v1.prefill_service_pb2_grpc import PrefillServiceStub
from services.decode.app import serve as serve_decode
from services.decode.config import DecodeConfig
from services.prefill.app import serve as serve_prefill
from services.prefill.config import PrefillConfig
from tests.support.fake_engine import FINGERPRINT, FakeEngine, loaded
from tests.support.handoff_cluster import ENGINE, DecodeStream, a_context
from tests.support.small_cache import small_layout

WAIT_S = 10.0
GRPC = TransferConfig(engine="grpc")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(kw_only=True)
class App:
    """A worker that serves in this process."""

    engine: FakeEngine
    channel: Any
    stop: asyncio.Event
    serving: asyncio.Task[None]

    async def health(self, service: str) -> int:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
        return int(response.status)

    async def until_health(self, service: str, status: int) -> None:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
        async for response in watch:
            if response.status == status:
                watch.cancel()
                return


@contextlib.asynccontextmanager
async def running(role: str, **changes: Any) -> AsyncIterator[App]:
    engine = FakeEngine(small_layout())
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    if role == "decode":
        work = serve_decode(
            DecodeConfig(model="fake", engine=ENGINE, port=0, transfer=GRPC, **changes),
            ready=address.set_result,
            stop=stop,
            loaded=loaded(engine),
        )
    else:
        work = serve_prefill(
            PrefillConfig(model="fake", engine=ENGINE, port=0, transfer=GRPC, **changes),
            ready=address.set_result,
            stop=stop,
            loaded=loaded(engine),
        )
    serving = asyncio.create_task(work)
    channel = open_channel(await asyncio.wait_for(address, WAIT_S))
    try:
        yield App(engine=engine, channel=channel, stop=stop, serving=serving)
    finally:
        permits, engine.permits = engine.permits, None
        if permits is not None:
            permits.release(1000)
        stop.set()
        await channel.close()
        await asyncio.wait_for(serving, WAIT_S)


@pytest.fixture
async def silent_peer() -> AsyncIterator[str]:
    """The address of something that takes connections and never answers: a hand-off to it neither ends nor fails."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.mark.parametrize(
    ("role", "services"),
    [
        ("prefill", ["dspark.v1.PrefillService"]),
        ("decode", ["dspark.v1.DecodeService", "dspark.v1.HandoffService"]),
    ],
)
async def test_a_worker_that_says_ready_is_healthy_and_lists_its_services(
    role: str, services: list[str]
) -> None:
    async with running(role) as app:
        for service in ("", "liveness", "readiness", *services):
            assert await app.health(service) == SERVING
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(app.channel)
        call = stub.ServerReflectionInfo(timeout=WAIT_S)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = [each.name for each in (await call.read()).list_services_response.service]
        call.cancel()
        assert set(services) <= set(listed)


async def test_workers_say_what_they_are_and_how_full() -> None:
    async with running("decode", computes_prompts=True, drain_s=0.0) as app:
        stub: Any = DecodeServiceStub(app.channel)
        context = a_context(100, max_tokens=100)
        await stub.Reserve(
            decode_service_pb2.ReserveRequest(
                request_id=context.request_id, num_tokens=100, max_length=200
            ),
            timeout=WAIT_S,
        )
        request = decode_service_pb2.DecodeServiceGetWorkerInfoRequest()
        info = (await stub.GetWorkerInfo(request, timeout=WAIT_S)).info
        assert (info.role, info.model, info.model_fingerprint) == ("decode", "fake", FINGERPRINT)
        assert (info.num_pages, info.num_free_pages) == (16, 14)
        assert (info.num_slots, info.num_free_slots) == (4, 3)
        assert (info.queued_requests, info.running_requests) == (1, 0)
        assert (info.max_context_length, info.vocab_size, info.draft_length) == (1024, 1000, 5)
        assert info.computes_prompts and not info.draining
        assert info.transfer_engines == ["grpc"]
        assert info.generation and info.version
        first_generation = info.generation
    async with running("prefill") as app:
        prefill: Any = PrefillServiceStub(app.channel)
        info_request = prefill_service_pb2.PrefillServiceGetWorkerInfoRequest()
        info = (await prefill.GetWorkerInfo(info_request, timeout=WAIT_S)).info
        assert info.role == "prefill"
        assert info.generation != first_generation


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_step_that_hangs_makes_a_worker_not_ready_but_leaves_it_alive(
    role: str, silent_peer: str
) -> None:
    async with running(
        role, stall_s=0.05, **({"computes_prompts": True} if role == "decode" else {})
    ) as app:
        app.engine.permits = threading.Semaphore(0)
        call = await begin(app, role, silent_peer)
        await app.until_health("readiness", NOT_SERVING)
        assert await app.health("liveness") == SERVING
        permits, app.engine.permits = app.engine.permits, None
        permits.release(1)
        await app.until_health("readiness", SERVING)
        call.cancel()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_crashed_engine_makes_a_worker_not_ready(role: str, silent_peer: str) -> None:
    async with running(role, **({"computes_prompts": True} if role == "decode" else {})) as app:
        app.engine.crash = RuntimeError("out of memory")
        call = await begin(app, role, silent_peer)
        await app.until_health("", NOT_SERVING)
        call.cancel()


async def begin(app: App, role: str, silent_peer: str) -> Any:
    """Give the engine something to do; returns the call that it belongs to."""
    context = a_context(100)
    if role == "prefill":
        return PrefillServiceStub(app.channel).Prefill(
            prefill_service_pb2.PrefillRequest(
                context=convert.context_to_pb(context),
                ticket=prefill_service_pb2.DecodeTicket(decode_address=silent_peer),
            )
        )
    stub: Any = DecodeServiceStub(app.channel)
    stream = DecodeStream(stub.Decode())
    reserved = await stub.Reserve(
        decode_service_pb2.ReserveRequest(
            request_id=context.request_id, num_tokens=100, max_length=132
        )
    )
    await stream.admit(context, reserved)
    await stream.next("admitted")
    return stream.call


async def test_a_stopped_decode_worker_finishes_what_runs_and_takes_nothing_new() -> None:
    async with running("decode", computes_prompts=True) as app:
        stub: Any = DecodeServiceStub(app.channel)
        context = a_context(30)
        reserved = await stub.Reserve(
            decode_service_pb2.ReserveRequest(request_id="r", num_tokens=30, max_length=62)
        )
        stream = DecodeStream(stub.Decode())
        await stream.admit(context, reserved)
        await stream.next("admitted")
        app.stop.set()
        await app.until_health("readiness", NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Reserve(
                decode_service_pb2.ReserveRequest(request_id="s", num_tokens=3, max_length=5)
            )
        assert isinstance(error_of_call(caught.value, peer="decode"), Draining)
        length = 30
        for number in range(1, 5):
            verified = await stream.next("verified")
            length += len(verified.token_ids)
            await stream.commit(context, number, length, finish=number == 4)
        await stream.skip_to("finished")
        await asyncio.wait_for(app.serving, WAIT_S)


async def test_what_does_not_finish_in_time_is_told_so() -> None:
    async with running("decode", computes_prompts=True, drain_s=0.05) as app:
        stub: Any = DecodeServiceStub(app.channel)
        context = a_context(30)
        reserved = await stub.Reserve(
            decode_service_pb2.ReserveRequest(request_id="r", num_tokens=30, max_length=62)
        )
        stream = DecodeStream(stub.Decode())
        await stream.admit(context, reserved)
        app.stop.set()
        failed = await stream.skip_to("failed")
        assert failed.reason == "WORKER_LOST"
        await asyncio.wait_for(app.serving, WAIT_S)


async def test_a_port_in_use_is_said_before_anything_is_served() -> None:
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port_number = taken.sockets[0].getsockname()[1]
    config = DecodeConfig(model="fake", engine=ENGINE, port=port_number)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port_number}"):
        await serve_decode(config, stop=asyncio.Event(), loaded=loaded(FakeEngine(small_layout())))
    taken.close()


def test_settings_that_cannot_work_are_refused_by_name() -> None:
    for name in ("reservation_s", "stall_s", "drain_s"):
        with pytest.raises(ConfigError, match=f"{name} is -1"):
            DecodeConfig(model="fake", engine=ENGINE, **{name: -1.0})  # type: ignore[arg-type]
    for name in ("max_queued", "stall_s", "drain_s"):
        with pytest.raises(ConfigError, match=name):
            PrefillConfig(model="fake", engine=ENGINE, **{name: -1})  # type: ignore[arg-type]
