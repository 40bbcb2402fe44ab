"""Prefill and decode workers as processes run them: start, health, what they say of themselves, drain, stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.engine.build import LoadedEngine
from common.errors import ConfigError, Draining, EngineFailed
from common.rpc import convert, worker_process
from common.rpc.status import error_of_call
from common.telemetry.startup import Startup
from dspark.v1 import decode_service_pb2, prefill_service_pb2
from dspark.v1.decode_service_pb2_grpc import DecodeServiceStub
from dspark.v1.prefill_service_pb2_grpc import PrefillServiceStub
from services.cli.ports import free_ports
from services.decode.app import serve as serve_decode
from services.decode.config import DecodeConfig
from services.prefill.app import serve as serve_prefill
from services.prefill.config import HandoffConfig, PrefillConfig
from tests.support.fake_engine import FINGERPRINT, FakeEngine, loaded
from tests.support.handoff_cluster import ENGINE, DecodeStream, a_context
from tests.support.http import get
from tests.support.small_cache import small_layout
from tests.support.waiting import LOOK_S, WAIT_S, until
from tests.support.worker_apps import GRPC, App, begin, running

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def request_for(decode: App) -> prefill_service_pb2.PrefillRequest:
    """To compute 100 tokens for a reservation that is made here."""
    context = a_context(100)
    stub: Any = DecodeServiceStub(decode.channel)
    reserved = await stub.Reserve(
        decode_service_pb2.ReserveRequest(
            request_id=context.request_id, num_tokens=100, max_length=132
        )
    )
    return prefill_service_pb2.PrefillRequest(
        context=convert.context_to_pb(context),
        ticket=prefill_service_pb2.DecodeTicket(
            decode_address=decode.address,
            reservation_id=reserved.reservation_id,
            capability=reserved.capability,
        ),
    )


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
        mesh = info.mesh
        assert (mesh.dp, mesh.tp, mesh.ep, mesh.num_ranks, mesh.device) == (1, 1, 1, 1, "cpu")
        (memory,) = info.memory
        assert (memory.rank, memory.device) == (0, "cpu")
        buffers = app.engine.pool.buffers
        assert {claim.owner: claim.num_bytes for claim in memory.claims} == {
            name: buffer.tensor.nbytes for name, buffer in buffers.items()
        }
        assert {claim.kind for claim in memory.claims} == {"pages", "rings", "drafter"}
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
async def test_a_step_that_hangs_for_longer_means_that_the_process_should_be_ended(
    role: str, silent_peer: str
) -> None:
    computes = {"computes_prompts": True} if role == "decode" else {}
    async with running(role, stall_s=0.02, dead_s=0.05, **computes) as app:
        app.engine.permits = threading.Semaphore(0)
        call = await begin(app, role, silent_peer)
        await app.until_health("liveness", NOT_SERVING)
        assert await app.health("readiness") == NOT_SERVING
        call.cancel()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_crashed_engine_ends_the_process_with_its_cause(
    role: str, silent_peer: str
) -> None:
    async with running(role, **({"computes_prompts": True} if role == "decode" else {})) as app:
        app.engine.crash = RuntimeError("a kernel failed")
        call = await begin(app, role, silent_peer)
        with pytest.raises(EngineFailed, match="the engine failed: RuntimeError: a kernel failed"):
            await asyncio.wait_for(app.serving, WAIT_S)
        call.cancel()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_draining_worker_is_not_ready_and_alive(role: str, silent_peer: str) -> None:
    async with running(role, **({"computes_prompts": True} if role == "decode" else {})) as app:
        app.engine.permits = threading.Semaphore(0)
        call = await begin(app, role, silent_peer)
        await until(lambda: app.engine.num_gated > 0)
        app.stop.set()
        await app.until_health("readiness", NOT_SERVING)
        assert await app.health("liveness") == SERVING
        call.cancel()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_loads_answers_its_probes_meanwhile(role: str) -> None:
    """A slow load is no reason to end a process, and its phase says how far it is."""
    (port,) = free_ports("127.0.0.1", 1)
    is_loading, is_loaded, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def load(startup: Startup) -> LoadedEngine:
        startup.begin("weights")
        is_loading.set()
        await is_loaded.wait()
        return loaded(FakeEngine(small_layout()))

    config: Any = DecodeConfig if role == "decode" else PrefillConfig
    serve: Any = serve_decode if role == "decode" else serve_prefill
    serving = asyncio.create_task(
        serve(
            config(model="fake", engine=ENGINE, port=0, transfer=GRPC, admin_port=port),
            ready=address.set_result,
            stop=stop,
            load=load,
        )
    )
    await asyncio.wait_for(is_loading.wait(), WAIT_S)
    starting = (503, "starting: weights\n")
    ok = (200, "ok\n")
    paths = ("/startupz", "/readyz", "/livez")
    assert [await asyncio.to_thread(get, port, path) for path in paths] == [starting, starting, ok]
    is_loaded.set()
    await asyncio.wait_for(address, WAIT_S)
    assert [await asyncio.to_thread(get, port, path) for path in paths] == [ok, ok, ok]
    stop.set()
    await asyncio.wait_for(serving, WAIT_S)


async def test_a_stopped_decode_worker_finishes_what_runs_and_takes_nothing_new() -> None:
    async with running("decode", computes_prompts=True) as app:
        stub: Any = DecodeServiceStub(app.channel)
        context = a_context(30)
        reserved = await stub.Reserve(
            decode_service_pb2.ReserveRequest(request_id="r", num_tokens=30, max_length=62)
        )
        stream = DecodeStream(stub.Decode())
        await stream.send_admit(context, reserved)
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


async def test_a_stopped_prefill_worker_lives_until_its_last_lease_has_ended() -> None:
    (port,) = free_ports("127.0.0.1", 1)
    async with (
        running("decode", drain_s=0.0) as decode,
        running("prefill", drain_s=WAIT_S, admin_port=port) as app,
    ):
        stub: Any = PrefillServiceStub(app.channel)
        request = await request_for(decode)
        *_, last = [event async for event in stub.Prefill(request, timeout=WAIT_S)]
        app.stop.set()
        await app.until_health("readiness", NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Prefill(request, timeout=WAIT_S).read()
        assert isinstance(error_of_call(caught.value, peer="prefill"), Draining)
        draining = (503, "draining, safe_to_delete: false\n")
        assert await asyncio.to_thread(get, port, "/readyz") == draining
        question = prefill_service_pb2.PrefillServiceGetWorkerInfoRequest()
        info = (await stub.GetWorkerInfo(question, timeout=WAIT_S)).info
        assert (info.draining, info.num_leases, info.safe_to_delete) == (True, 1, False)
        assert not app.serving.done()
        release = prefill_service_pb2.ReleaseLeaseRequest(lease_id=last.handoff_done.lease_id)
        assert (await stub.ReleaseLease(release, timeout=WAIT_S)).found
        await asyncio.wait_for(app.serving, WAIT_S)


async def test_a_lease_that_nobody_renews_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "TEND_PERIOD_S", 0.01)
    async with (
        running("decode", drain_s=0.0) as decode,
        running("prefill", handoff=HandoffConfig(lease_s=0.05)) as app,
    ):
        stub: Any = PrefillServiceStub(app.channel)
        request = await request_for(decode)
        *_, last = [event async for event in stub.Prefill(request, timeout=WAIT_S)]
        assert last.handoff_done.lease_id
        question = prefill_service_pb2.PrefillServiceGetWorkerInfoRequest()
        info = await everything_free(lambda: stub.GetWorkerInfo(question, timeout=WAIT_S))
        assert (info.num_leases, info.details["expired_leases"]) == (0, "1")


async def test_a_reservation_that_nobody_asks_after_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_process, "TEND_PERIOD_S", 0.01)
    async with running("decode", reservation_s=0.05) as app:
        stub: Any = DecodeServiceStub(app.channel)
        reserved = await stub.Reserve(
            decode_service_pb2.ReserveRequest(request_id="r", num_tokens=100, max_length=132)
        )
        assert reserved.reservation_id
        question = decode_service_pb2.DecodeServiceGetWorkerInfoRequest()
        info = await everything_free(lambda: stub.GetWorkerInfo(question, timeout=WAIT_S))
        assert info.queued_requests == 0


async def everything_free(ask: Callable[[], Any]) -> Any:
    """What a worker says of itself once it holds nothing for anybody."""
    async with asyncio.timeout(WAIT_S):
        while True:
            info = (await ask()).info
            if (info.num_free_pages, info.num_free_slots) == (info.num_pages, info.num_slots):
                return info
            await asyncio.sleep(LOOK_S)


async def test_what_does_not_finish_in_time_is_told_so() -> None:
    async with running("decode", computes_prompts=True, drain_s=0.05) as app:
        stub: Any = DecodeServiceStub(app.channel)
        context = a_context(30)
        reserved = await stub.Reserve(
            decode_service_pb2.ReserveRequest(request_id="r", num_tokens=30, max_length=62)
        )
        stream = DecodeStream(stub.Decode())
        await stream.send_admit(context, reserved)
        await stream.next("admitted")
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


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_stop_before_the_start_is_over_ends_it_and_says_so(
    role: str, caplog: pytest.LogCaptureFixture
) -> None:
    stop = asyncio.Event()

    async def load(startup: Startup) -> LoadedEngine:
        startup.begin("weights")
        stop.set()
        never: asyncio.Future[LoadedEngine] = asyncio.get_running_loop().create_future()
        return await never

    config: Any = DecodeConfig if role == "decode" else PrefillConfig
    serve: Any = serve_decode if role == "decode" else serve_prefill
    work = serve(config(model="fake", engine=ENGINE, port=0), stop=stop, load=load)
    await asyncio.wait_for(work, WAIT_S)
    assert "stopped before it had started" in caplog.text
