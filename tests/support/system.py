"""Router, prefill and decode as real gRPC servers of this process. Knows how they start and stop, and how full they are."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import grpc

from common.engine.settings import EngineSettings
from common.telemetry.tracing import OFF, Tracing
from common.transfer.config import TransferConfig
from common.transfer.faults import FaultPlan
from dspark.v1 import decode_service_pb2, prefill_service_pb2, worker_pb2
from dspark.v1.decode_service_pb2_grpc import DecodeServiceStub
from dspark.v1.inference_service_pb2_grpc import InferenceServiceStub
from dspark.v1.prefill_service_pb2_grpc import PrefillServiceStub
from services.cli.ports import free_ports
from services.decode.app import serve as serve_decode
from services.decode.config import DecodeConfig
from services.prefill.app import serve as serve_prefill
from services.prefill.config import HandoffConfig, PrefillConfig
from services.router import RouterConfig, WorkerConfig
from services.router import serve as serve_router
from tests.support.processes import wait_all_known
from tests.support.waiting import LOOK_S, WAIT_S, in_time

Result = TypeVar("Result")
Service = Callable[..., Coroutine[Any, Any, None]]

START_S = 180.0
STOP_S = WAIT_S
CALL_S = WAIT_S
REST_S = 10.0

PATIENT_WATCH = WorkerConfig(poll_timeout_s=WAIT_S, reserve_timeout_s=WAIT_S)
PATIENT_HANDOFF = HandoffConfig(
    negotiate_timeout_s=WAIT_S, transfer_timeout_s=WAIT_S, complete_timeout_s=WAIT_S
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemOptions:
    """What tests vary."""

    checkpoint_dir: Path
    computes_prompts: bool = False
    """One decode worker does everything; there is no prefill worker."""
    sends_drafter_state: bool = True
    transfer: TransferConfig = field(default_factory=TransferConfig)
    faults: str = ""
    """Of the prefill worker's writes."""
    transfer_timeout_s: float = WAIT_S
    """Of one write."""
    prefill_dtype: str = "float32"
    prefill_checkpoint_dir: Path | None = None
    """When it is another one than decode's."""
    num_slots: int = 16
    num_pages: int | None = None
    admin_key_file: Path | None = None
    serves_metrics: bool = False
    can_hand_over: bool = True
    """False: the two workers do not fit together, so the router is never ready; it is there when it knows both."""
    is_patient: bool = False
    """Nobody is given up because this machine is slow: for tests that count placements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What nobody holds on the workers."""

    pages: tuple[int, ...]
    slots: tuple[int, ...]
    num_busy: int
    """Requests that wait or run, and leases."""


class EventLoop:
    """A thread with an event loop for servers: gRPC's asyncio side wants one loop in a process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        self.call(self._loop.stop)
        self._thread.join(STOP_S)
        self._loop.close()


class System:
    """A router with its workers, from the `with` block's start to its end."""

    def __init__(
        self,
        loop: EventLoop,
        options: SystemOptions,
        *,
        tracing: Callable[[str], Tracing] = lambda role: OFF,
    ) -> None:
        """`tracing` is asked for each role's."""
        self._loop = loop
        self._options = options
        self._tracing = tracing
        self.address = ""
        ports = free_ports("127.0.0.1", 3) if options.serves_metrics else (0, 0, 0)
        self.admin_ports = dict(zip(("router", "prefill", "decode"), ports, strict=True))
        self.prefill_address = ""
        self.decode_address = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[System]:
        with contextlib.ExitStack() as services:
            self._start_workers(services)
            self._start_router(services)
            self._channels = [
                services.enter_context(grpc.insecure_channel(address))
                for address in (self.prefill_address, self.decode_address)
                if address
            ]
            self.at_rest = self.room()
            yield self

    def room(self) -> Room:
        """What is free now, by the workers' own account."""
        infos = [self._info(channel) for channel in self._channels]
        return Room(
            pages=tuple(info.num_free_pages for info in infos),
            slots=tuple(info.num_free_slots for info in infos),
            num_busy=sum(
                info.running_requests + info.queued_requests + info.num_leases for info in infos
            ),
        )

    def wait_at_rest(self, within_s: float = REST_S) -> None:
        """Return once as much is free as in the beginning, which is to be within a time on the servers' event loop."""
        resting = self._loop.submit(in_time(self._rest(), within_s))
        concurrent.futures.wait([resting])
        room = self.room()
        assert room == self.at_rest, f"not freed: {room}, at rest {self.at_rest}"
        resting.result()

    async def _rest(self) -> None:
        while True:
            if await asyncio.to_thread(self.room) == self.at_rest:
                return
            await asyncio.sleep(LOOK_S)

    def _start_workers(self, services: contextlib.ExitStack) -> None:
        options = self._options
        engine = EngineSettings(
            checkpoint_dir=options.checkpoint_dir,
            num_slots=options.num_slots,
            num_pages=options.num_pages,
        )
        decode = DecodeConfig(
            port=0,
            admin_port=self.admin_ports["decode"],
            model="dspark-tiny",
            engine=engine,
            computes_prompts=options.computes_prompts,
            transfer=options.transfer,
            admin_key_file=options.admin_key_file,
        )
        self.decode_address = services.enter_context(self._serving(serve_decode, decode, "decode"))
        if not options.computes_prompts:
            prefill = PrefillConfig(
                port=0,
                admin_port=self.admin_ports["prefill"],
                model="dspark-tiny",
                engine=replace(
                    engine,
                    dtype=options.prefill_dtype,
                    checkpoint_dir=options.prefill_checkpoint_dir or options.checkpoint_dir,
                ),
                transfer=options.transfer,
                handoff=replace(
                    PATIENT_HANDOFF if options.is_patient else HandoffConfig(),
                    sends_drafter_state=options.sends_drafter_state,
                    transfer_timeout_s=options.transfer_timeout_s,
                ),
                faults=FaultPlan.parse(options.faults),
                admin_key_file=options.admin_key_file,
            )
            self.prefill_address = services.enter_context(
                self._serving(serve_prefill, prefill, "prefill")
            )

    def _start_router(self, services: contextlib.ExitStack) -> None:
        (port,) = (0,) if self._options.can_hand_over else free_ports("127.0.0.1", 1)
        address = f"127.0.0.1:{port}" if port else None
        self.address = services.enter_context(
            self._serving(serve_router, self._router(port), "router", address=address)
        )
        if address is not None:
            with grpc.insecure_channel(address) as channel:
                grpc.channel_ready_future(channel).result(START_S)
                wait_all_known(InferenceServiceStub(channel))

    def _router(self, port: int) -> RouterConfig:
        return RouterConfig(
            port=port,
            admin_port=self.admin_ports["router"],
            model="dspark-tiny",
            checkpoint_dir=self._options.checkpoint_dir,
            decode_addresses=(self.decode_address,),
            prefill_addresses=(self.prefill_address,) if self.prefill_address else (),
            workers=PATIENT_WATCH if self._options.is_patient else WorkerConfig(),
        )

    @contextlib.contextmanager
    def _serving(
        self, serve: Service, config: object, role: str, *, address: str | None = None
    ) -> Iterator[str]:
        """One service, from its readiness to the end of its drain; from its start when its address is given."""
        stop = asyncio.Event()
        ready: concurrent.futures.Future[str] = concurrent.futures.Future()
        if address is not None:
            ready.set_result(address)
        on_ready = None if address is not None else ready.set_result
        work = serve(config, ready=on_ready, stop=stop, tracing=self._tracing(role))
        ended = self._loop.submit(work)
        try:
            either: list[concurrent.futures.Future[Any]] = [ready, ended]
            concurrent.futures.wait(
                either, timeout=START_S, return_when=concurrent.futures.FIRST_COMPLETED
            )
            if ended.done():
                ended.result()
            yield ready.result(timeout=0)
        finally:
            self._loop.call(stop.set)
            ended.result(timeout=STOP_S)

    def _info(self, channel: grpc.Channel) -> worker_pb2.WorkerInfo:
        if self.prefill_address and channel is self._channels[0]:
            request = prefill_service_pb2.PrefillServiceGetWorkerInfoRequest()
            return PrefillServiceStub(channel).GetWorkerInfo(request, timeout=CALL_S).info
        question = decode_service_pb2.DecodeServiceGetWorkerInfoRequest()
        return DecodeServiceStub(channel).GetWorkerInfo(question, timeout=CALL_S).info
