"""Workers as processes run them, in the test's own: started, asked, stopped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import EngineFailed
from common.rpc import convert
from common.rpc.channel import open_channel
from common.transfer.config import TransferConfig
from dspark.v1 import decode_service_pb2, prefill_service_pb2
from dspark.v1.decode_service_pb2_grpc import DecodeServiceStub
from dspark.v1.prefill_service_pb2_grpc import PrefillServiceStub
from services.decode.app import serve as serve_decode
from services.decode.config import DecodeConfig
from services.prefill.app import serve as serve_prefill
from services.prefill.config import PrefillConfig
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.handoff_cluster import ENGINE, DecodeStream, a_context
from tests.support.small_cache import small_layout
from tests.support.waiting import WAIT_S

GRPC = TransferConfig(engine="grpc")


@dataclass(kw_only=True)
class App:
    """A worker that serves in this process."""

    engine: FakeEngine
    address: str
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
        yield App(
            engine=engine, address=address.result(), channel=channel, stop=stop, serving=serving
        )
    finally:
        permits, engine.permits = engine.permits, None
        if permits is not None:
            permits.release(1000)
        stop.set()
        await channel.close()
        with contextlib.suppress(*([EngineFailed] if engine.crash else [])):
            await asyncio.wait_for(serving, WAIT_S)


async def begin(app: App, role: str, silent_peer: str = "") -> Any:
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
    await stream.send_admit(context, reserved)
    await stream.next("admitted")
    return stream.call
