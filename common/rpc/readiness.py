"""Keeps a server's health in step with its worker. Knows health; not what makes a worker healthy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from common.rpc.server import RpcServer

logger = logging.getLogger(__name__)


async def follow_readiness(
    server: RpcServer, why_not_ready: Callable[[], str | None], *, period_s: float = 0.5
) -> None:
    """Report ready while `why_not_ready` answers None, until cancelled; each change is logged with its reason.

    The server has been set ready before.
    """
    was_ready = True
    while True:
        reason = why_not_ready()
        if (reason is None) != was_ready:
            was_ready = reason is None
            await server.set_ready(was_ready)
            if reason is not None:
                logger.warning("not ready: %s", reason)
        await asyncio.sleep(period_s)
