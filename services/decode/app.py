"""A decode worker as a process: engine, server, health, drain. Knows the order of things; no requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from common.checkpoint.reader import Progress
from common.engine.build import LoadedEngine, build_engine
from common.rpc.channel import open_channel
from common.rpc.readiness import follow_readiness
from common.rpc.server import RpcServer, build_server
from common.rpc.worker_info import WorkerIdentity
from common.telemetry.admin import AdminServer
from common.telemetry.metrics import TransferMetrics
from common.transfer.engines import open_engines
from common.transfer.grpc_engine import GrpcTransferEngine
from common.transfer.memory import PoolMemory
from services.decode.config import DecodeConfig
from services.decode.servicer import SERVICE_NAMES, register
from services.decode.worker import DecodeWorker

logger = logging.getLogger(__name__)

EXPIRY_PERIOD_S = 1.0
STOP_GRACE_S = 1.0


async def serve(
    config: DecodeConfig,
    *,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event,
    loaded: LoadedEngine | None = None,
    on_progress: Progress | None = None,
) -> None:
    """Run until `stop` is set, then let running requests finish for `drain_s`.

    `ready` is called once with host:port. Loads the checkpoint unless `loaded` is given. Raises CheckpointError and
    ConfigError before anything is served.
    """
    if loaded is None:
        loaded = await asyncio.to_thread(build_engine, config.engine, on_progress=on_progress)
    worker = build_worker(config, loaded)
    server = build_server(
        host=config.host,
        port=config.port,
        service_names=SERVICE_NAMES,
        register=lambda grpc_server: register(worker, grpc_server),
    )
    admin = AdminServer(worker.metrics.registry, host=config.host, port=config.admin_port)
    worker.engine.start()
    await server.start()
    await server.set_ready(True)
    background = [
        asyncio.create_task(follow_readiness(server, lambda: why_not_ready(worker, config))),
        asyncio.create_task(_expire(worker)),
    ]
    logger.info("decode worker %s serves %s", server.address, config.model)
    if ready is not None:
        ready(server.address)
    try:
        await stop.wait()
        await _drain(worker, server, config.drain_s)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await worker.close()
        await server.stop(STOP_GRACE_S)
        admin.close()


def build_worker(config: DecodeConfig, loaded: LoadedEngine) -> DecodeWorker:
    """A worker around a loaded engine; must be called inside the event loop that will serve."""
    memory = PoolMemory(loaded.engine.pool)
    metrics = TransferMetrics()
    grpc_engine = GrpcTransferEngine(memory, open_channel)
    engines = open_engines(config.transfer.at(config.host), memory, grpc_engine)
    identity = WorkerIdentity(
        role="decode",
        model=config.model,
        model_fingerprint=loaded.fingerprint,
        max_context_length=loaded.engine.config.max_context_length,
        vocab_size=loaded.model_config.vocab_size,
        draft_length=loaded.engine.config.draft_length,
        num_pages=loaded.num_pages,
        num_slots=loaded.num_slots,
        transfer_engines=engines.names,
        computes_prompts=config.computes_prompts,
    )
    return DecodeWorker(
        loaded.engine,
        identity=identity,
        memory=memory,
        engines=engines,
        metrics=metrics,
        reservation_s=config.reservation_s,
    )


def why_not_ready(worker: DecodeWorker, config: DecodeConfig) -> str | None:
    """The reason for which routers should send nothing here now; None when they may."""
    if worker.is_draining:
        return "draining"
    if worker.engine.has_crashed:
        return "the engine failed"
    if worker.engine.busy_s > config.stall_s:
        return f"a step has taken {worker.engine.busy_s:.0f} s so far"
    return None


async def _expire(worker: DecodeWorker) -> None:
    while True:
        await asyncio.sleep(EXPIRY_PERIOD_S)
        worker.expire()
        await worker.quarantine.ask_all()


async def _drain(worker: DecodeWorker, server: RpcServer, drain_s: float) -> None:
    worker.is_draining = True
    await server.set_ready(False)
    logger.info("draining %d requests", len(worker.reservations))
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(worker.reservations.wait_empty(), drain_s)
