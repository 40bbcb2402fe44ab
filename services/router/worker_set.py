"""The workers of one role, one for each address that there is now. Knows when one comes or goes; not what it does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from services.router.discovery import Discovery
from services.router.policy import WorkerState

logger = logging.getLogger(__name__)


class Member(Protocol):
    """A worker, as far as belonging goes."""

    address: str
    state: WorkerState
    running_requests: int

    async def close(self) -> None:
        """Let go of its connections."""


WorkerT = TypeVar("WorkerT", bound=Member)


class WorkerSet(Generic[WorkerT]):
    """Has a worker for every address; `run` must run for names to be followed and workers to be watched.

    A worker that is no longer named stays for as long as it answers or carries requests: a pod that drains loses its
    name before its requests are done.
    """

    def __init__(
        self,
        discovery: Discovery,
        *,
        create: Callable[[str], WorkerT],
        watch: Callable[[WorkerT], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        """`watch` keeps one worker's state true until it is cancelled; `on_change` hears when one was dropped."""
        self._discovery = discovery
        self._create = create
        self._watch = watch
        self._on_change = on_change
        self._watching: dict[str, asyncio.Task[None]] = {}
        self.workers = [create(address) for address in discovery.fixed]
        """In the order of configuration, then of arrival; the same list for ever."""

    async def run(self, period_s: float) -> None:
        """Watch all workers and look up the names every `period_s` until cancelled, then let go of all workers."""
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.workers:
                    self._begin(group, worker)
                while self._discovery.names:
                    await self._follow(group)
                    await asyncio.sleep(period_s)
        finally:
            for worker in self.workers:
                await worker.close()

    async def _follow(self, group: asyncio.TaskGroup) -> None:
        named = await self._discovery.look()
        for address in sorted(named - {worker.address for worker in self.workers}):
            logger.info("found worker %s", address)
            worker = self._create(address)
            self.workers.append(worker)
            self._begin(group, worker)
        for worker in tuple(self.workers):
            if worker.address not in named and _is_gone(worker):
                await self._drop(worker)

    def _begin(self, group: asyncio.TaskGroup, worker: WorkerT) -> None:
        self._watching[worker.address] = group.create_task(_watched(self._watch, worker))

    async def _drop(self, worker: WorkerT) -> None:
        logger.info("worker %s is gone and has no name any more", worker.address)
        self.workers.remove(worker)
        watching = self._watching.pop(worker.address)
        watching.cancel()
        await asyncio.wait((watching,))
        await worker.close()
        self._on_change()


async def _watched(watch: Callable[[WorkerT], Awaitable[None]], worker: WorkerT) -> None:
    await watch(worker)


def _is_gone(worker: Member) -> bool:
    answers = worker.state in (WorkerState.READY, WorkerState.DRAINING)
    return not answers and worker.running_requests == 0
