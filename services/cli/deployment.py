"""Router, prefill and decode workers as processes of this machine. Knows their order; not what they say to each other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from pydantic_settings import CliApp

from common.config import child_environment, num_cores
from services.cli.children import Child
from services.cli.failures import EXIT_OTHER, Failure
from services.cli.ports import free_ports, require_free
from services.cli.process import STOP_MARGIN_S
from services.cli.settings import AllSettings
from services.cli.signals import StopSignals
from services.cli.timeline import Timeline

FAILED_STOP_S = 5.0
"""What the other processes get to stop after one has died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One process that is to be started."""

    name: str
    command: str
    settings: AllSettings
    num_threads: int


def plans(settings: AllSettings) -> list[Plan]:
    """The processes of `dspark up`, the router last. Workers get free ports; a router port of 0 becomes a free one."""
    up, router = settings.up, settings.router
    require_free(router.host, router.port, "--port")
    ports = iter(free_ports("127.0.0.1", up.prefills + up.decodes + 1))
    threads = max(1, num_cores() // (up.prefills + up.decodes))
    # Children are told everything by flags: what was configured here is already in these settings.
    own = settings.model_copy(update={"config": None, "api_key": None})
    if not up.prefills:
        decode = own.decode.model_copy(update={"computes_prompts": True})
        own = own.model_copy(update={"decode": decode})
    workers = [
        *_workers(own, "prefill", up.prefills, ports, threads),
        *_workers(own, "decode", up.decodes, ports, threads),
    ]
    addresses = {
        f"{command}_workers": tuple(
            f"127.0.0.1:{_port(plan)}" for plan in workers if plan.command == command
        )
        for command in ("prefill", "decode")
    }
    router = router.model_copy(update={"port": router.port or next(ports), **addresses})
    plan = Plan(
        name="router",
        command="router",
        settings=own.model_copy(update={"router": router}),
        num_threads=1,
    )
    return [*workers, plan]


def _workers(
    settings: AllSettings, command: str, count: int, ports: Iterator[int], threads: int
) -> list[Plan]:
    section = getattr(settings, command)
    return [
        Plan(
            name=f"{command}-{index}",
            command=command,
            settings=settings.model_copy(
                update={
                    command: section.model_copy(
                        update={
                            "host": "127.0.0.1",
                            "port": next(ports),
                            "admin_port": section.admin_port and section.admin_port + index,
                        }
                    )
                }
            ),
            num_threads=section.threads or threads,
        )
        for index in range(count)
    ]


def _port(plan: Plan) -> int:
    port: int = getattr(plan.settings, plan.command).port
    return port


class Deployment:
    """The processes of one plan, from `start` to `stop`."""

    def __init__(self, children: list[Child], timeline: Timeline) -> None:
        self._children = children
        self._timeline = timeline

    @classmethod
    async def start(cls, settings: AllSettings, timeline: Timeline) -> Deployment:
        deployment = cls([], timeline)
        try:
            for plan in plans(settings):
                child = await Child.start(
                    plan.name,
                    [plan.command, *CliApp.serialize(plan.settings)],
                    child_environment(plan.num_threads),
                    timeline.reporter(plan.name),
                )
                deployment._children.append(child)
        except BaseException:
            await deployment.kill()
            raise
        return deployment

    async def ready(self, timeout_s: float) -> str:
        """Wait until every process answers; returns the router's address. Raises a Failure that says who is missing."""
        waiting = [child.ready for child in self._children]
        await asyncio.wait(waiting, timeout=timeout_s)
        missing = [
            f"{child.name} ({self._timeline.phase_of(child.name)})"
            for child in self._children
            if not child.ready.done()
        ]
        if missing:
            raise Failure(
                f"not ready after {timeout_s:.0f} s: {', '.join(missing)}; wait longer with --ready-timeout-s",
                exit_code=EXIT_OTHER,
            )
        return self._children[-1].ready.result()

    async def death(self) -> Failure:
        """Wait for the first process to end by itself; why it did, and what it was doing."""
        deaths = {asyncio.create_task(child.death()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in deaths:
                task.cancel()
        first = done.pop()
        failure = first.result()
        phase = self._timeline.phase_of(deaths[first].name)
        return Failure(f"{failure.cause} (phase: {phase})", exit_code=failure.exit_code)

    async def stop(self, grace_s: float) -> None:
        """Stop the router, which finishes its requests, then the workers."""
        *workers, router = self._children
        await router.stop(grace_s)
        await asyncio.gather(*(worker.stop(grace_s) for worker in workers))

    async def kill(self) -> None:
        """End every process at once and wait for them."""
        for child in self._children:
            child.kill()
        await asyncio.gather(*(child.stop(0.0) for child in self._children))


async def run_deployment(
    settings: AllSettings, timeline: Timeline, use: Callable[[str], Awaitable[None]]
) -> None:
    """Start everything, await `use(router address)`, stop everything.

    A stop signal cancels `use` and ends normally; a second one ends the processes at once. Raises a Failure when a process
    dies or does not become ready. No process is left when this returns.
    """
    signals = StopSignals()
    deployment = await Deployment.start(settings, timeline)
    grace_s = settings.shutdown_s + 2 * STOP_MARGIN_S

    async def job() -> None:
        await use(await deployment.ready(settings.up.ready_timeout_s))

    tasks = [
        asyncio.ensure_future(work) for work in (job(), deployment.death(), signals.stop.wait())
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        used, death, _ = tasks
        if death.done():
            grace_s = FAILED_STOP_S
            failure = death.result()
            assert isinstance(failure, Failure)
            raise failure
        if used.done():
            used.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await _stop(deployment, signals, grace_s)


async def _stop(deployment: Deployment, signals: StopSignals, grace_s: float) -> None:
    stop = asyncio.ensure_future(deployment.stop(grace_s))
    hurry = asyncio.ensure_future(signals.hurry.wait())
    await asyncio.wait({stop, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not stop.done():
        stop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stop
        await deployment.kill()
    else:
        stop.result()
