"""A prefill and a decode worker on loopback in this process, and a router's side of both by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from common.engine.build import LoadedEngine
from common.engine.settings import EngineSettings
from common.rpc import convert
from common.rpc.channel import open_channel
from common.rpc.server import RpcServer, build_server
from common.telemetry.metrics import WorkerMetrics
from common.transfer.config import TransferConfig
from common.types import RequestContext, RequestId, SamplingParams, StopParams
from dspark.v1 import decode_service_pb2, prefill_service_pb2
from dspark.v1.decode_service_pb2_grpc import DecodeServiceStub
from dspark.v1.handoff_service_pb2_grpc import HandoffServiceStub
from dspark.v1.prefill_service_pb2_grpc import PrefillServiceStub
from services.decode import app as decode_app
from services.decode import servicer as decode_servicer
from services.decode.config import DecodeConfig
from services.decode.worker import DecodeWorker
from services.prefill import app as prefill_app
from services.prefill import servicer as prefill_servicer
from services.prefill.config import HandoffConfig, PrefillConfig
from services.prefill.worker import PrefillWorker
from tests.support.waiting import WAIT_S, in_time, until

FREED_S = 1.0
"""Within which everything that a request held is free again, however it ended."""
PATIENT = HandoffConfig(
    negotiate_timeout_s=WAIT_S,
    transfer_timeout_s=WAIT_S,
    complete_timeout_s=WAIT_S,
    abort_timeout_s=WAIT_S,
)
"""A busy machine is no reason to give a peer up that answers."""
ENGINE = EngineSettings(checkpoint_dir=Path("/not/read"))


def a_context(
    num_tokens: int,
    *,
    request_id: str = "r",
    epoch: int = 0,
    num_committed: int = 0,
    max_tokens: int = 32,
    first: int = 11,
) -> RequestContext:
    """A context of `num_tokens` tokens, the last `num_committed` of which were generated before."""
    tokens = [first, *range(1, num_tokens)]
    cut = num_tokens - num_committed
    return RequestContext(
        request_id=RequestId(request_id),
        epoch=epoch,
        prompt=tuple(tokens[:cut]),
        committed=tokens[cut:],
        sampling=SamplingParams(seed=7),
        stop=StopParams(max_tokens=max_tokens),
    )


class Admits:
    """How often a decode worker was asked to admit each reservation, whatever it thought of it."""

    def __init__(self, worker: DecodeWorker) -> None:
        self.counts: Counter[str] = Counter()
        admit = worker.admit

        def counted(outbox: Any, context: Any, reservation_id: str, *rest: Any) -> None:
            admit(outbox, context, reservation_id, *rest)
            self.counts[reservation_id] += 1

        cast(Any, worker).admit = counted


class DecodeStream:
    """A router's stream to a decode worker."""

    def __init__(self, call: Any, admits: Admits | None = None) -> None:
        self.call = call
        self._admits = admits
        self.messages: list[decode_service_pb2.DecodeResponse] = []
        self._events: list[decode_service_pb2.DecodeEvent] = []
        self._writing = asyncio.Lock()

    async def admit(
        self, context: RequestContext, reserved: Any, *, capability: bytes | None = None
    ) -> None:
        """Send Admit and wait until the worker has read it: other calls, sent later, could overtake it."""
        assert self._admits is not None, "nobody counts what this worker is asked"
        counts, reservation_id = self._admits.counts, reserved.reservation_id
        before = counts[reservation_id]
        await self.send_admit(context, reserved, capability=capability)
        await until(lambda: counts[reservation_id] > before)

    async def send_admit(
        self, context: RequestContext, reserved: Any, *, capability: bytes | None = None
    ) -> None:
        await self.send(
            admit=decode_service_pb2.Admit(
                request_id=context.request_id,
                epoch=context.epoch,
                reservation_id=reserved.reservation_id,
                capability=reserved.capability if capability is None else capability,
                context=convert.context_to_pb(context),
            )
        )

    async def commit(
        self, context: RequestContext, round_: int, length: int, *, finish: bool = False
    ) -> None:
        await self.send(
            commit=decode_service_pb2.Commit(
                request_id=context.request_id,
                epoch=context.epoch,
                round=round_,
                length=length,
                finish=finish,
            )
        )

    async def abort(self, context: RequestContext, reservation_id: str = "") -> None:
        await self.send(
            abort=decode_service_pb2.Abort(
                request_id=context.request_id, epoch=context.epoch, reservation_id=reservation_id
            )
        )

    async def send(self, **command: Any) -> None:
        request = decode_service_pb2.DecodeRequest(
            commands=[decode_service_pb2.DecodeCommand(**command)]
        )
        async with self._writing:
            await asyncio.wait_for(self.call.write(request), WAIT_S)

    async def next(self, kind: str) -> Any:
        """The next event, which must be of this kind."""
        event = await self._next()
        assert event.WhichOneof("event") == kind, f"{kind} expected: {event}"
        return getattr(event, kind)

    async def skip_to(self, kind: str) -> Any:
        """The next event of this kind; others before it are dropped, but for a failure."""
        while (event := await self._next()).WhichOneof("event") != kind:
            assert event.WhichOneof("event") != "failed", f"{kind} expected: {event}"
        return getattr(event, kind)

    async def _next(self) -> decode_service_pb2.DecodeEvent:
        while not self._events:
            response = await asyncio.wait_for(self.call.read(), WAIT_S)
            self.messages.append(response)
            self._events += response.events
        return self._events.pop(0)


@dataclass(kw_only=True)
class Cluster:
    """Both workers with their stubs."""

    prefill: PrefillWorker
    decode: DecodeWorker
    admits: Admits
    """Of the decode worker."""
    prefill_address: str
    decode_address: str
    prefill_stub: Any
    decode_stub: Any
    handoff_stub: Any
    decode_channel: Any
    decode_server: RpcServer
    decode_config: DecodeConfig
    streams: list[DecodeStream] = field(default_factory=list)

    def stream(self) -> DecodeStream:
        stream = DecodeStream(self.decode_stub.Decode(), self.admits)
        self.streams.append(stream)
        return stream

    async def reserve(self, context: RequestContext, **changes: Any) -> Any:
        fields: dict[str, Any] = {
            "request_id": context.request_id,
            "epoch": context.epoch,
            "num_tokens": context.length,
            "max_length": context.max_length,
        }
        request = decode_service_pb2.ReserveRequest(**(fields | changes))
        return await self.decode_stub.Reserve(request, timeout=WAIT_S)

    def start_prefill(self, context: RequestContext, reserved: Any, **changes: Any) -> Any:
        ticket: dict[str, Any] = {
            "decode_address": self.decode_address,
            "reservation_id": reserved.reservation_id,
            "capability": reserved.capability,
        }
        request = prefill_service_pb2.PrefillRequest(
            context=convert.context_to_pb(context),
            ticket=prefill_service_pb2.DecodeTicket(**(ticket | changes)),
        )
        return self.prefill_stub.Prefill(request, timeout=WAIT_S)

    async def hand_over(self, context: RequestContext, reserved: Any) -> tuple[Any, Any]:
        """Run a prefill to its end: (first token, hand-off)."""
        events = [event async for event in self.start_prefill(context, reserved)]
        assert [event.WhichOneof("event") for event in events] == ["first_token", "handoff_done"]
        return events[0].first_token, events[1].handoff_done

    async def restart_decode(self, engine: LoadedEngine) -> None:
        """Another decode process, as it were, on the same port."""
        await self.decode.close()
        await self.decode_server.stop(0)
        metrics = WorkerMetrics(model="fake", role="decode")
        self.decode = decode_app.build_worker(self.decode_config, engine, metrics)
        self.admits = Admits(self.decode)
        self.decode_server = _decode_server(self.decode, port=self.decode_server.port)
        await _start(self.decode, self.decode_server)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something inside the workers that no message announces."""
        await until(condition)

    async def require_clean(self) -> None:
        """Everything that was held is free again on both sides, within the second that is promised."""
        self.prefill.leases.expire()
        for lease_id in list(self.prefill.leases._leases):
            self.prefill.release_lease(lease_id)
        await in_time(self._emptied(), FREED_S)
        self.decode.reservations.check_integrity()
        for memory in (self.decode.room, self.prefill.room.memory):
            memory.check_integrity()
            assert memory.num_free_pages == memory.num_pages
            assert memory.num_free_slots == memory.num_slots

    async def _emptied(self) -> None:
        await self.decode.reservations.wait_empty()
        await self.prefill.wait_idle()


@contextlib.asynccontextmanager
async def cluster(
    prefill_engine: LoadedEngine,
    decode_engine: LoadedEngine,
    *,
    computes_prompts: bool = False,
    handoff: HandoffConfig | None = None,
    transfer: TransferConfig | None = None,
    decode_transfer: TransferConfig | None = None,
    max_queued: int = 4,
) -> AsyncIterator[Cluster]:
    """Both workers, started; stopped in the end whatever happened. Bytes go by gRPC unless `transfer` says otherwise."""
    transfer = transfer or TransferConfig(engine="grpc")
    decode_config = DecodeConfig(
        model="fake",
        engine=ENGINE,
        port=0,
        computes_prompts=computes_prompts,
        transfer=decode_transfer or transfer,
    )
    prefill_config = PrefillConfig(
        model="fake",
        engine=ENGINE,
        port=0,
        handoff=handoff or PATIENT,
        transfer=transfer,
        max_queued=max_queued,
    )
    decode_metrics = WorkerMetrics(model="fake", role="decode")
    decode = decode_app.build_worker(decode_config, decode_engine, decode_metrics)
    prefill_metrics = WorkerMetrics(model="fake", role="prefill")
    prefill = prefill_app.build_worker(prefill_config, prefill_engine, prefill_metrics)
    decode_server = _decode_server(decode, port=0)
    prefill_server = build_server(
        host="127.0.0.1",
        port=0,
        service_names=prefill_servicer.SERVICE_NAMES,
        register=lambda server: prefill_servicer.register(prefill, server),
    )
    await _start(decode, decode_server)
    await _start(prefill, prefill_server)
    prefill.pairs.own_address = prefill_server.address
    prefill_channel, decode_channel = (
        open_channel(server.address) for server in (prefill_server, decode_server)
    )
    running = Cluster(
        prefill=prefill,
        decode=decode,
        admits=Admits(decode),
        prefill_address=prefill_server.address,
        decode_address=decode_server.address,
        prefill_stub=PrefillServiceStub(prefill_channel),
        decode_stub=DecodeServiceStub(decode_channel),
        handoff_stub=HandoffServiceStub(decode_channel),
        decode_channel=decode_channel,
        decode_server=decode_server,
        decode_config=decode_config,
    )
    try:
        yield running
    finally:
        for stream in running.streams:
            stream.call.cancel()
        await prefill_channel.close()
        await decode_channel.close()
        await prefill.close()
        await prefill_server.stop(0)
        await running.decode.close()
        await running.decode_server.stop(0)


def _decode_server(worker: DecodeWorker, *, port: int) -> RpcServer:
    return build_server(
        host="127.0.0.1",
        port=port,
        service_names=decode_servicer.SERVICE_NAMES,
        register=lambda server: decode_servicer.register(worker, server),
    )


async def _start(worker: PrefillWorker | DecodeWorker, server: RpcServer) -> None:
    worker.engine.start()
    await server.start()
    await server.set_ready(True)
