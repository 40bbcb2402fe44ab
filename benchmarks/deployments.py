"""Deployments to measure: the three services as processes, speculating or not. Knows commands; asks nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from pydantic_settings import CliApp

from common.config import child_environment
from services.cli.children import Child
from services.cli.deployment import Deployment, plans
from services.cli.settings import AllSettings
from services.cli.timeline import Timeline

READY_S = 180.0
STOP_S = 10.0


@contextlib.asynccontextmanager
async def deployed(
    model: str, *, speculate: bool, transfer_engine: str = "auto"
) -> AsyncIterator[str]:
    """The address of a router in front of one prefill and one decode worker; all gone at the end."""
    settings = AllSettings.model_validate(
        {
            "model": model,
            "router": {"port": 0},
            "engine": {"speculate": speculate},
            "transfer": {"engine": transfer_engine},
            "log": {"level": "warning"},
        }
    )
    deployment = await Deployment.start(settings, Timeline())
    try:
        yield await _ready(deployment)
    finally:
        await deployment.stop(STOP_S)


@contextlib.asynccontextmanager
async def workers(model: str, *commands: str) -> AsyncIterator[list[str]]:
    """Addresses of a worker for each command, "prefill" or "decode", with no router; all gone at the end."""
    timeline, children = Timeline(), []
    settings = AllSettings.model_validate({"model": model, "log": {"level": "warning"}})
    try:
        for plan in plans(settings):
            if plan.command in commands:
                arguments = [plan.command, *CliApp.serialize(plan.settings)]
                environment = child_environment(plan.num_threads)
                report = timeline.reporter(plan.name)
                children.append(await Child.start(plan.name, arguments, environment, report))
        yield [await _address(child) for child in children]
    finally:
        await asyncio.gather(*(child.stop(STOP_S) for child in children))


async def _address(child: Child) -> str:
    """The address, or at once the reason why there will be none."""
    death = asyncio.ensure_future(child.death())
    try:
        await asyncio.wait(
            (child.ready, death), timeout=READY_S, return_when=asyncio.FIRST_COMPLETED
        )
        if death.done():
            raise death.result()
        return child.ready.result()
    finally:
        death.cancel()


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
