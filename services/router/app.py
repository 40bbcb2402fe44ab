"""A router process: serves until it is told to stop, then drains. Knows start and end; nothing between."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from common.rpc.readiness import follow_health
from common.rpc.server import build_server
from common.telemetry.admin import AdminServer
from common.telemetry.metrics import RouterMetrics
from common.telemetry.probes import Probes
from common.telemetry.tracing import OFF, Tracing
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
    config: RouterConfig,
    *,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event,
    tracing: Tracing = OFF,
) -> None:
    """Run a router until `stop` is set, then refuse new requests, let running ones finish and return.

    `ready` is called once, with the address, when the port is open and two workers that have met could run a request.
    Requests are traced by `tracing`, which its owner closes.
    Raises ConfigError or CheckpointError when the router cannot start.
    """
    probes, changed = Probes(), asyncio.Event()
    metrics = RouterMetrics(model=config.model, compat=config.metrics_compat)
    admin = AdminServer(metrics.registry, probes, host=config.host, port=config.admin_port)
    with contextlib.closing(admin):
        router = Router(config, metrics=metrics, on_change=changed.set, tracing=tracing)
        server = build_server(
            host=config.host,
            port=config.port,
            service_names=(SERVICE_NAME,),
            register=lambda s: add_InferenceServiceServicer_to_server(RouterServicer(router), s),
            max_message_bytes=config.max_message_bytes,
            max_connection_age_s=config.max_connection_age_s,
        )
        watching = asyncio.create_task(router.workers.watch())
        await server.start()
        logger.info("router listens on %s", server.address)
        probes.started(why_not_ready=router.why_not_ready)

        def on_ready() -> None:
            metrics.process.started({"workers": router.uptime_s})
            if ready is not None:
                ready(server.address)

        reporting = asyncio.create_task(
            follow_health(server, probes, changed=changed, on_ready=on_ready)
        )
        try:
            await _until_set(stop, watching, reporting)
        finally:
            logger.info("router drains %d requests", len(router.contexts))
            router.contexts.refuse_new()
            changed.set()
            await router.contexts.drain(config.drain_timeout_s)
            await _cancelled(reporting)
            await server.stop(STOP_GRACE_S)
            await router.leases.close()
            await _cancelled(watching)


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
