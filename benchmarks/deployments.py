"""Deployments to measure: the three services as processes, speculating or not. Knows commands; asks nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.cli.deployment import Deployment, plans
from services.cli.settings import AllSettings
from services.cli.timeline import Timeline

READY_S = 180.0
STOP_S = 10.0


@contextlib.asynccontextmanager
async def deployed(
    model: str, *, speculate: bool, prefill_admin_port: int = 0
) -> AsyncIterator[str]:
    """The address of a router in front of one prefill and one decode worker; all gone at the end.

    The prefill worker serves its metrics at a port other than 0.
    """
    settings = AllSettings.model_validate(
        {
            "model": model,
            "router": {"port": 0},
            "engine": {"speculate": speculate},
            "prefill": {"admin_port": prefill_admin_port},
            "log": {"level": "warning"},
        }
    )
    deployment = await Deployment.start(settings, Timeline())
    try:
        yield await _ready(deployment)
    finally:
        await deployment.stop(STOP_S)


async def _ready(deployment: Deployment) -> str:
    """The address, or at once the reason why there will be none."""
    ready = asyncio.ensure_future(deployment.ready(READY_S))
    death = asyncio.ensure_future(deployment.death())
    try:
        await asyncio.wait((ready, death), return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            raise death.result()
        return ready.result()
    finally:
        ready.cancel()
        death.cancel()
        await asyncio.wait((ready, death))


def worker_threads() -> int:
    """Threads that a worker of such a deployment computes with."""
    return next(p.num_threads for p in plans(AllSettings()) if p.command == "decode")
