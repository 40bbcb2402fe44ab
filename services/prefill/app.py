"""A prefill worker as a process: engine, server, health, drain. Knows the order of things; no requests."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from common.checkpoint.reader import Progress
from common.engine.build import LoadedEngine, build_engine
from common.rpc.server import build_server
from common.rpc.worker_info import WorkerIdentity
from common.rpc.worker_process import run_worker
from common.telemetry.admin import AdminServer
from common.telemetry.metrics import TransferMetrics
from common.transfer.engines import open_engines
from common.transfer.faulty_engine import with_faults
from common.transfer.grpc_engine import GrpcTransferEngine
from common.transfer.handoff import CacheContract
from common.transfer.memory import PoolMemory
from services.prefill.config import PrefillConfig
from services.prefill.handoff import Sender
from services.prefill.pairs import Pairs
from services.prefill.peers import Peers
from services.prefill.servicer import SERVICE_NAMES, register
from services.prefill.worker import PrefillWorker

logger = logging.getLogger(__name__)

ANY_HOST = ("0.0.0.0", "::", "[::]")


async def serve(
    config: PrefillConfig,
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
    worker.pairs.own_address = advertised_address(config, server.port)
    logger.info("prefill worker %s serves %s", server.address, config.model)
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


def build_worker(config: PrefillConfig, loaded: LoadedEngine) -> PrefillWorker:
    """A worker around a loaded engine; must be called inside the event loop that will serve."""
    memory = PoolMemory(loaded.engine.pool)
    metrics = TransferMetrics()
    peers = Peers()
    grpc_engine = GrpcTransferEngine(
        memory, peers.channel, write_timeout_s=config.handoff.transfer_timeout_s
    )
    engines = open_engines(config.transfer.at(config.host), memory, grpc_engine)
    if config.faults.faults:
        engines = with_faults(engines, config.faults, memory)
    identity = WorkerIdentity(
        role="prefill",
        model=config.model,
        model_fingerprint=loaded.fingerprint,
        max_context_length=loaded.engine.config.max_context_length,
        vocab_size=loaded.model_config.vocab_size,
        draft_length=loaded.engine.config.draft_length,
        num_pages=loaded.num_pages,
        num_slots=loaded.num_slots,
        transfer_engines=engines.names,
    )
    pairs = Pairs(
        peers=peers,
        engines=engines,
        memory=memory,
        contract=CacheContract(model_fingerprint=loaded.fingerprint, layout=loaded.layout),
        generation=identity.generation,
        config=config.transfer,
        metrics=metrics,
        meet_timeout_s=config.handoff.negotiate_timeout_s,
    )
    sender = Sender(memory=memory, pairs=pairs, config=config.handoff, metrics=metrics)
    return PrefillWorker(
        loaded.engine,
        identity=identity,
        sender=sender,
        peers=peers,
        max_queued=config.max_queued,
        job_timeout_s=config.job_timeout_s,
    )


def advertised_address(config: PrefillConfig, port: int) -> str:
    """Where decode workers reach this one."""
    host = config.advertise_host
    if not host:
        host = socket.gethostname() if config.host in ANY_HOST else config.host
    return f"{host}:{port}"
