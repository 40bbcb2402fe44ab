"""A decode worker as a process: engine, server, health, drain. Knows the order of things; no requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from common.checkpoint.reader import Progress
from common.engine.build import LoadedEngine, build_engine
from common.rpc.channel import open_channel
from common.rpc.server import build_server
from common.rpc.worker_info import WorkerIdentity
from common.rpc.worker_process import run_worker
from common.telemetry.admin import AdminServer
from common.telemetry.metrics import TransferMetrics
from common.transfer.engines import open_engines
from common.transfer.grpc_engine import GrpcTransferEngine
from common.transfer.memory import PoolMemory
from services.decode.config import DecodeConfig
from services.decode.servicer import SERVICE_NAMES, register
from services.decode.worker import DecodeWorker

logger = logging.getLogger(__name__)


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
    logger.info("decode worker %s serves %s", server.address, config.model)
    try:
        await run_worker(
            worker,
            server,
            stall_s=config.stall_s,
            drain_s=config.drain_s,
            ready=ready,
            stop=stop,
        )
    finally:
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
