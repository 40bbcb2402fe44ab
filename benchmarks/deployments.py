"""Deployments to measure: the three services as processes, speculating or not. Knows commands; asks nothing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from services.cli.deployment import Deployment
from services.cli.settings import AllSettings
from services.cli.timeline import Timeline

READY_S = 180.0
STOP_S = 10.0


@contextlib.asynccontextmanager
async def deployed(model: str, *, speculate: bool) -> AsyncIterator[str]:
    """The address of a router in front of one prefill and one decode worker; all gone at the end."""
    settings = AllSettings.model_validate(
        {
            "model": model,
            "router": {"port": 0},
            "engine": {"speculate": speculate},
            "log": {"level": "warning"},
        }
    )
    deployment = await Deployment.start(settings, Timeline())
    try:
        yield await deployment.ready(READY_S)
    finally:
        await deployment.stop(STOP_S)


def worker_threads() -> int:
    """Threads that a worker of such a deployment computes with."""
    from services.cli.deployment import plans

    return next(p.num_threads for p in plans(AllSettings()) if p.command == "decode")
