"""A router process: serves until it is told to stop, then drains. Knows start and end; nothing between."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from common.rpc.server import RpcServer, build_server
from common.telemetry.admin import AdminServer
from common.telemetry.metrics import process_registry
from dspark.v1 import inference_service_pb2 as pb
from dspark.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from services.router.config import RouterConfig
from services.router.router import Router
from services.router.servicer import RouterServicer

logger = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""For calls that are no requests, and for answers on their way, after the requests were drained."""

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name


async def serve(
    config: RouterConfig, *, ready: Callable[[str], None] | None = None, stop: asyncio.Event
) -> None:
    """Run a router until `stop` is set, then refuse new requests, let running ones finish and return.

    `ready` is called once, with the address, when the port is open and a request could be placed.
    Raises ConfigError or CheckpointError when the router cannot start.
    """
    changed = asyncio.Event()
    router = Router(config, on_change=changed.set)
    server = build_server(
        host=config.host,
        port=config.port,
        service_names=(SERVICE_NAME,),
        register=lambda s: add_InferenceServiceServicer_to_server(RouterServicer(router), s),
        max_message_bytes=config.max_message_bytes,
        max_connection_age_s=config.max_connection_age_s,
    )
    admin = AdminServer(process_registry(), host=config.host, port=config.admin_port)
    watching = asyncio.create_task(router.workers.watch())
    await server.start()
    logger.info("router listens on %s", server.address)
    reporting = asyncio.create_task(_report_readiness(router, server, changed, ready))
    try:
        await _until_set(stop, watching, reporting)
    finally:
        await _cancelled(reporting)
        await server.set_ready(False)
        logger.info("router drains %d requests", len(router.contexts))
        await router.contexts.drain(config.drain_timeout_s)
        await server.stop(STOP_GRACE_S)
        await router.leases.close()
        await _cancelled(watching)
        admin.close()


async def _report_readiness(
    router: Router,
    server: RpcServer,
    changed: asyncio.Event,
    ready: Callable[[str], None] | None,
) -> None:
    """Health follows the workers: a router that could place nothing says so before a request finds out."""
    while True:
        changed.clear()
        is_ready = router.workers.is_ready
        await server.set_ready(is_ready)
        if is_ready and ready is not None:
            ready(server.address)
            ready = None
        await changed.wait()


async def _until_set(stop: asyncio.Event, *tasks: asyncio.Task[None]) -> None:
    """Wait for `stop`; a background task that ends before it has failed, and its error rises."""
    stopping = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait((stopping, *tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()
    finally:
        await _cancelled(stopping)


async def _cancelled(task: asyncio.Task[None] | asyncio.Task[bool]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
