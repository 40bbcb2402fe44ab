"""The life of a worker process between its first and its last request. Knows health, drain and order; no requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from common.errors import ConfigError, EngineFailed
from common.rpc.readiness import follow_health
from common.rpc.server import RpcServer
from common.telemetry.probes import Probes

logger = logging.getLogger(__name__)

Started = TypeVar("Started")

TEND_PERIOD_S = 1.0
STOP_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a worker's process bears with it."""

    stall_s: float
    """A step that takes longer makes the worker not ready."""
    dead_s: float
    """A step that takes longer means that the process should be ended."""
    drain_s: float
    """How long running requests may go on after a stop was asked for."""

    def __post_init__(self) -> None:
        if self.stall_s <= 0:
            raise ConfigError(f"stall_s is {self.stall_s}; give a value above 0")
        if self.dead_s <= self.stall_s:
            raise ConfigError(f"dead_s is {self.dead_s}; give more than stall_s ({self.stall_s})")
        if self.drain_s < 0:
            raise ConfigError(f"drain_s is {self.drain_s}; give 0 or more")


class EngineHealth(Protocol):
    """What an engine thread tells of itself."""

    @property
    def crash(self) -> Exception | None: ...
    @property
    def busy_s(self) -> float: ...
    async def wait_crashed(self) -> None: ...


class Worker(Protocol):
    """What prefill and decode workers have in common."""

    is_draining: bool

    @property
    def engine(self) -> EngineHealth: ...
    @property
    def is_safe_to_delete(self) -> bool:
        """Whether it drains and nothing is here any more that a request could need or a peer could still touch."""

    async def tend(self) -> None:
        """Do what time asks for; called about every second."""

    def begin_draining(self) -> None:
        """Take nothing new."""

    async def wait_idle(self) -> None:
        """Return once nothing runs and nothing is kept. The caller sets the deadline."""

    async def close(self) -> None:
        """End what is left and stop the engine."""


async def unless_stopped(start: Awaitable[Started], stop: asyncio.Event) -> Started | None:
    """What a start gives; None when a stop is asked for before. What cannot be left half done ends with the process."""
    starting, stopping = asyncio.ensure_future(start), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
    finally:
        starting.cancel()
        stopping.cancel()
    logger.warning(
        "stopped before it had started; if nobody meant to, a start-up probe is too short"
    )
    return None


async def run_worker(
    worker: Worker,
    server: RpcServer,
    probes: Probes,
    *,
    patience: Patience,
    ready: Callable[[str], None] | None,
    stop: asyncio.Event,
) -> None:
    """Serve from a started server until `stop` is set, let requests finish for a while, then end everything.

    `ready` is called once with host:port. Raises EngineFailed, after every request was told, when the engine fails.
    """
    probes.started(
        why_not_ready=functools.partial(why_not_ready, worker, patience.stall_s),
        why_not_alive=functools.partial(why_not_alive, worker, patience.dead_s),
    )
    on_ready = None if ready is None else functools.partial(ready, server.address)
    changed = asyncio.Event()
    background = [
        asyncio.create_task(follow_health(server, probes, changed=changed, on_ready=on_ready)),
        asyncio.create_task(_tend(worker)),
    ]
    try:
        await _first(stop.wait(), worker.engine.wait_crashed())
        worker.begin_draining()
        changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience.drain_s):
                await _first(worker.wait_idle(), worker.engine.wait_crashed())
        probes.turn()
        if worker.engine.crash is not None:
            raise _failure(worker.engine.crash) from worker.engine.crash
        if not worker.is_safe_to_delete:
            logger.warning("ending with what did not end in %s s", patience.drain_s)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await worker.close()
        await server.stop(STOP_GRACE_S)


def why_not_ready(worker: Worker, stall_s: float) -> str | None:
    """The reason for which routers should send nothing here now; None when they may."""
    if worker.is_draining:
        return f"draining, safe_to_delete: {str(worker.is_safe_to_delete).lower()}"
    return _busy_longer_than(stall_s, worker)


def why_not_alive(worker: Worker, dead_s: float) -> str | None:
    """The reason for which this process should be ended; None when it should not."""
    if worker.engine.crash is not None:
        return _failure(worker.engine.crash).message
    return _busy_longer_than(dead_s, worker)


def _busy_longer_than(limit_s: float, worker: Worker) -> str | None:
    busy_s = worker.engine.busy_s
    return f"a step has taken {busy_s:.0f} s so far" if busy_s > limit_s else None


def _failure(crash: Exception) -> EngineFailed:
    return EngineFailed(f"the engine failed: {type(crash).__name__}: {crash}")


async def _tend(worker: Worker) -> None:
    while True:
        await asyncio.sleep(TEND_PERIOD_S)
        await worker.tend()


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Return with whichever ends first."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
