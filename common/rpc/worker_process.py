"""The life of a worker process between its first and its last request. Knows health, drain and order; no requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from common.rpc.readiness import follow_readiness
from common.rpc.server import RpcServer

TEND_PERIOD_S = 1.0
STOP_GRACE_S = 1.0


class EngineHealth(Protocol):
    """What an engine thread tells of itself."""

    @property
    def has_crashed(self) -> bool: ...
    @property
    def busy_s(self) -> float: ...


class Worker(Protocol):
    """What prefill and decode workers have in common."""

    is_draining: bool

    @property
    def engine(self) -> EngineHealth: ...
    async def tend(self) -> None:
        """Do what time asks for; called about every second."""

    def begin_draining(self) -> None:
        """Take nothing new."""

    async def wait_idle(self) -> None:
        """Return once nothing runs. The caller sets the deadline."""

    async def close(self) -> None:
        """End what is left and stop the engine."""


async def run_worker(
    worker: Worker,
    server: RpcServer,
    *,
    stall_s: float,
    drain_s: float,
    ready: Callable[[str], None] | None,
    stop: asyncio.Event,
) -> None:
    """Serve from a started server until `stop` is set, let requests finish for `drain_s`, then end everything.

    `ready` is called once with host:port. A step that takes longer than `stall_s` makes the worker unready.
    """
    await server.set_ready(True)
    background = [
        asyncio.create_task(follow_readiness(server, lambda: _why_not_ready(worker, stall_s))),
        asyncio.create_task(_tend(worker)),
    ]
    try:
        if ready is not None:
            ready(server.address)
        await stop.wait()
        worker.begin_draining()
        await server.set_ready(False)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(worker.wait_idle(), drain_s)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await worker.close()
        await server.stop(STOP_GRACE_S)


def _why_not_ready(worker: Worker, stall_s: float) -> str | None:
    """The reason for which routers should send nothing here now; None when they may."""
    if worker.is_draining:
        return "draining"
    if worker.engine.has_crashed:
        return "the engine failed"
    if worker.engine.busy_s > stall_s:
        return f"a step has taken {worker.engine.busy_s:.0f} s so far"
    return None


async def _tend(worker: Worker) -> None:
    while True:
        await asyncio.sleep(TEND_PERIOD_S)
        await worker.tend()
