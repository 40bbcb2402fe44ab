"""A decode worker as a process: engine, server, health, drain. Knows the order of things; no requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict

import grpc.aio

from common.engine.build import LoadedEngine, build_engine
from common.engine.profiler import StepProfiler
from common.rpc import admin_servicer
from common.rpc.admin_key import AdminKey
from common.rpc.admin_servicer import register_admin
from common.rpc.channel import open_channel
from common.rpc.server import build_server
from common.rpc.tracing import server_interceptors
from common.rpc.worker_info import WorkerIdentity, WorkerMesh, describe
from common.rpc.worker_process import run_worker, unless_stopped
from common.telemetry.admin import AdminServer
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.probes import Probes
from common.telemetry.startup import Startup
from common.telemetry.tracing import OFF, Tracing
from common.transfer.engines import open_engines
from common.transfer.grpc_engine import GrpcTransferEngine
from common.transfer.memory import PoolMemory
from services.decode.config import DecodeConfig
from services.decode.servicer import SERVICE_NAMES, register
from services.decode.worker import DecodeWorker

logger = logging.getLogger(__name__)

Load = Callable[[Startup], Awaitable[LoadedEngine]]
"""Gives the engine, and tells what it is given how far that is."""


async def serve(
    config: DecodeConfig,
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
    metrics = WorkerMetrics(model=config.model, role="decode", compat=config.metrics_compat)
    admin = AdminServer(metrics.registry, probes, host=config.host, port=config.admin_port)
    with contextlib.closing(admin):
        startup = Startup(probes, metrics.process)
        loaded = loaded or await unless_stopped((load or _load(config))(startup), stop)
        if loaded is not None:
            startup.end()
            await _serve_loaded(config, loaded, metrics, probes, tracing, ready=ready, stop=stop)


def _load(config: DecodeConfig) -> Load:
    async def build(startup: Startup) -> LoadedEngine:
        startup.begin("weights")
        return await asyncio.to_thread(build_engine, config.engine, on_progress=startup.loading)

    return build


async def _serve_loaded(
    config: DecodeConfig,
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
    logger.info("decode worker %s serves %s", server.address, config.model)
    await run_worker(worker, server, probes, patience=config.patience, ready=ready, stop=stop)


def build_worker(
    config: DecodeConfig,
    loaded: LoadedEngine,
    metrics: WorkerMetrics,
    tracing: Tracing = OFF,
) -> DecodeWorker:
    """A worker around a loaded engine; must be called inside the event loop that will serve."""
    memory = PoolMemory(loaded.engine.pool)
    grpc_engine = GrpcTransferEngine(memory, open_channel)
    engines = open_engines(config.transfer.at(config.host), memory, grpc_engine)
    identity = WorkerIdentity(
        role="decode",
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
        computes_prompts=config.computes_prompts,
    )
    engine = config.engine
    describe(identity, metrics.process, dtype=engine.dtype, max_step_rows=engine.max_step_rows)
    metrics.engine.set_device_memory(loaded.memory)
    return DecodeWorker(
        loaded.engine,
        identity=identity,
        drafter_fingerprint=loaded.drafter_fingerprint,
        memory=memory,
        engines=engines,
        metrics=metrics,
        reservation_s=config.reservation_s,
        tracing=tracing,
    )
