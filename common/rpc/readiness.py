"""Keeps a server's health in step with its process. Knows health; not what makes a process healthy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from common.rpc.server import RpcServer
from common.telemetry.probes import Probes

logger = logging.getLogger(__name__)


async def follow_health(
    server: RpcServer,
    probes: Probes,
    *,
    changed: asyncio.Event | None = None,
    on_ready: Callable[[], None] | None = None,
    period_s: float = 0.5,
) -> None:
    """Report over gRPC what the probes say, until cancelled; each change is logged with its reason, once.

    Looks every `period_s`, and at once when `changed` is set. `on_ready` is called the first time that all is well.
    """
    changed = changed or asyncio.Event()
    was_ready, was_alive = False, True
    while True:
        changed.clear()
        probes.turn()
        dead, unready = probes.liveness(), probes.readiness()
        if was_alive is not (dead is None):
            was_alive = dead is None
            await server.set_alive(was_alive)
            if dead is not None:
                logger.error("not alive: %s", dead)
        if was_ready is not (unready is None):
            was_ready = unready is None
            await server.set_ready(was_ready)
            if unready is not None and dead is None:
                logger.warning("not ready: %s", unready)
        if unready is None and on_ready is not None:
            on_ready()
            on_ready = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(period_s):
                await changed.wait()
