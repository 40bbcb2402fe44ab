"""A prefill worker as a process: engine, server, health, drain. Knows the order of things; no requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict

import grpc.aio

from common.engine.build import LoadedEngine, build_engine
from common.engine.profiler import StepProfiler
from common.rpc import admin_servicer
from common.rpc.admin_key import AdminKey
from common.rpc.admin_servicer import register_admin
from common.rpc.server import build_server
from common.rpc.tracing import client_interceptors, server_interceptors
from common.rpc.worker_info import WorkerIdentity, WorkerMesh, describe
from common.rpc.worker_process import run_worker, unless_stopped
from common.telemetry.admin import AdminServer
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.probes import Probes
from common.telemetry.startup import Startup
from common.telemetry.tracing import OFF, Tracing
from common.transfer.engines import open_engines
from common.transfer.faulty_engine import with_faults
from common.transfer.grpc_engine import GrpcTransferEngine
from common.transfer.handoff import CacheContract
from common.transfer.memory import PoolMemory
from services.prefill.config import PrefillConfig
from services.prefill.link import LinkMeter
from services.prefill.pairs import Pairs
from services.prefill.peers import Peers
from services.prefill.sender import Sender
from services.prefill.servicer import SERVICE_NAMES, register
from services.prefill.worker import PrefillWorker

logger = logging.getLogger(__name__)

Load = Callable[[Startup], Awaitable[LoadedEngine]]
"""Gives the engine, and tells what it is given how far that is."""

ANY_HOST = ("0.0.0.0", "::", "[::]")


async def serve(
    config: PrefillConfig,
    *,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event,
    loaded: LoadedEngine | None = None,
    load: Load | None = None,
    tracing: Tracing = OFF,
) -> None:
    """Run until `stop` is set, then let running requests finish for `drain_s`.

    `ready` is called once with host:port. The engine is `loaded`, or what `load` gives, or else built as configured.
    Requests are traced by `tracing`, which its owner closes. A start is left when `stop` comes before its end. Raises
    CheckpointError and ConfigError before a request is served, EngineFailed when the engine fails.
    """
    probes = Probes()
    metrics = WorkerMetrics(model=config.model, role="prefill", compat=config.metrics_compat)
    admin = AdminServer(metrics.registry, probes, host=config.host, port=config.admin_port)
    with contextlib.closing(admin):
        startup = Startup(probes, metrics.process)
        loaded = loaded or await unless_stopped((load or _load(config))(startup), stop)
        if loaded is not None:
            startup.end()
            await _serve_loaded(config, loaded, metrics, probes, tracing, ready=ready, stop=stop)


def _load(config: PrefillConfig) -> Load:
    async def build(startup: Startup) -> LoadedEngine:
        startup.begin("weights")
        return await asyncio.to_thread(build_engine, config.engine, on_progress=startup.loading)

    return build


async def _serve_loaded(
    config: PrefillConfig,
    loaded: LoadedEngine,
    metrics: WorkerMetrics,
    probes: Probes,
    tracing: Tracing,
    *,
    ready: Callable[[str], None] | None,
    stop: asyncio.Event,
) -> None:
    worker = build_worker(config, loaded, metrics, tracing)
    admin_key = AdminKey(config.admin_key_file)

    def register_all(grpc_server: grpc.aio.Server) -> None:
        register(worker, grpc_server)
        register_admin(grpc_server, StepProfiler(worker.engine), admin_key)

    server = build_server(
        host=config.host,
        port=config.port,
        service_names=(*SERVICE_NAMES, admin_servicer.SERVICE_NAME),
        register=register_all,
        interceptors=server_interceptors(tracing),
    )
    worker.engine.start()
    await server.start()
    worker.pairs.own_address = advertised_address(config, server.port)
    logger.info("prefill worker %s serves %s", server.address, config.model)
    await run_worker(worker, server, probes, patience=config.patience, ready=ready, stop=stop)


def build_worker(
    config: PrefillConfig,
    loaded: LoadedEngine,
    metrics: WorkerMetrics,
    tracing: Tracing = OFF,
) -> PrefillWorker:
    """A worker around a loaded engine; must be called inside the event loop that will serve."""
    memory = PoolMemory(loaded.engine.pool)
    peers = Peers(client_interceptors(tracing))
    grpc_engine = GrpcTransferEngine(
        memory, peers.channel, write_timeout_s=config.handoff.write_timeout_s
    )
    engines = open_engines(config.transfer.at(config.host), memory, grpc_engine)
    if config.faults.faults:
        engines = with_faults(engines, config.faults, memory)
    identity = WorkerIdentity(
        role="prefill",
        model=config.model,
        model_fingerprint=loaded.fingerprint,
        max_context_length=loaded.max_context_length,
        vocab_size=loaded.model_config.vocab_size,
        draft_length=loaded.engine.config.draft_length,
        num_pages=loaded.num_pages,
        num_slots=loaded.num_slots,
        mesh=WorkerMesh(**asdict(config.engine.mesh), device=config.engine.device),
        memory=loaded.memory,
        transfer_engines=engines.names,
    )
    engine = config.engine
    describe(identity, metrics.process, dtype=engine.dtype, max_step_rows=engine.max_step_rows)
    metrics.engine.set_device_memory(loaded.memory)
    pairs = Pairs(
        peers=peers,
        engines=engines,
        memory=memory,
        contract=CacheContract(
            model_fingerprint=loaded.fingerprint,
            layout=loaded.layout,
            drafter_fingerprint=loaded.drafter_fingerprint,
        ),
        generation=identity.generation,
        config=config.transfer,
        metrics=metrics.transfer,
        meet_timeout_s=config.handoff.negotiate_timeout_s,
    )
    sender = Sender(
        memory=memory,
        pairs=pairs,
        config=config.handoff,
        metrics=metrics.transfer,
        link=LinkMeter(metrics.transfer),
    )
    return PrefillWorker(
        loaded.engine,
        identity=identity,
        sender=sender,
        peers=peers,
        metrics=metrics,
        max_queued=config.max_queued,
        job_timeout_s=config.job_timeout_s,
    )


def advertised_address(config: PrefillConfig, port: int) -> str:
    """Where decode workers reach this one."""
    host = config.advertise_host
    if not host:
        host = socket.gethostname() if config.host in ANY_HOST else config.host
    return f"{host}:{port}"
