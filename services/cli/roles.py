"""How each service is run in this process, with its start reported phase by phase. Knows the services; no signals.

What can be refused before the heavy imports is refused before them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from common.checkpoint.folder import checkpoint_folder, tokenizer_folder
from common.errors import WorkerLost
from common.rpc.worker_info import server_version
from common.telemetry.tracing import Tracing, open_tracing
from services.cli.configs import (
    decode_config,
    engine_settings,
    prefill_config,
    router_config,
    tracing_config,
)
from services.cli.events import Event, Phase, Progress, Ready, Report
from services.cli.ports import free_ports, require_free
from services.cli.settings import AllSettings

if TYPE_CHECKING:
    from common.engine.build import LoadedEngine
    from common.engine.settings import EngineSettings
    from common.telemetry.startup import Startup

logger = logging.getLogger(__name__)

PROGRESS_PERIOD_S = 0.05


async def run_router(settings: AllSettings, report: Report, stop: asyncio.Event) -> None:
    require_free(settings.router.host, settings.router.port, "--router.port")
    tokenizer_folder(settings.model)
    report(Phase(name="import"))
    from services.router.app import serve

    report(Phase(name="workers"))
    with _traced(settings, "router") as tracing:
        await serve(router_config(settings), ready=_ready(report), stop=stop, tracing=tracing)


async def run_prefill(settings: AllSettings, report: Report, stop: asyncio.Event) -> None:
    if settings.prefill.rendezvous.node_rank:
        await _run_ranks(engine_settings(settings, settings.prefill), settings.shutdown_s, stop)
        return
    require_free(settings.prefill.host, settings.prefill.port, "--prefill.port")
    checkpoint_folder(settings.model)
    report(Phase(name="import"))
    from services.prefill.app import serve

    config = prefill_config(settings)
    load = functools.partial(_load, config.engine, report)
    with _traced(settings, "prefill") as tracing:
        await serve(config, ready=_ready(report), stop=stop, load=load, tracing=tracing)


async def run_decode(settings: AllSettings, report: Report, stop: asyncio.Event) -> None:
    if settings.decode.rendezvous.node_rank:
        await _run_ranks(engine_settings(settings, settings.decode), settings.shutdown_s, stop)
        return
    require_free(settings.decode.host, settings.decode.port, "--decode.port")
    checkpoint_folder(settings.model)
    report(Phase(name="import"))
    from services.decode.app import serve

    config = decode_config(settings)
    load = functools.partial(_load, config.engine, report)
    with _traced(settings, "decode") as tracing:
        await serve(config, ready=_ready(report), stop=stop, load=load, tracing=tracing)


async def _run_ranks(settings: EngineSettings, shutdown_s: float, stop: asyncio.Event) -> None:
    """Ranks of a worker whose service runs on another machine, which tells them when they may end.

    That machine is told to stop when this one is, and its requests need these ranks until they have ended: `shutdown_s`
    is its time for that, after which the ranks are killed. Raises WorkerLost when a rank fails.
    """
    from common.engine.mesh_start import start_node

    ranks = await asyncio.to_thread(start_node, settings)
    ended = asyncio.ensure_future(asyncio.to_thread(ranks.wait))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not ended.done():
        logger.info("the ranks of this node run until the first node has finished its requests")
        await asyncio.wait({ended}, timeout=shutdown_s)
    if not ended.done():
        logger.warning("the first node did not end its ranks within %s s; killing them", shutdown_s)
        await asyncio.to_thread(ranks.kill)
        await ended
    elif code := ended.result():
        raise WorkerLost(ranks.why_lost_now() or f"the ranks ended with exit code {code}")


@contextlib.contextmanager
def _traced(settings: AllSettings, role: str) -> Iterator[Tracing]:
    tracing = open_tracing(tracing_config(settings), role=role, version=server_version())
    try:
        yield tracing
    finally:
        tracing.close()


async def _load(settings: EngineSettings, report: Report, startup: Startup) -> LoadedEngine:
    """An engine whose first steps are behind it: those compile kernels, which a request must not wait for.

    `startup` is told of all that `report` is.
    """
    from common.engine.build import build_engine
    from common.engine.warm_up import warm_up

    report = _telling(startup, report)
    report(Phase(name="weights"))
    loaded = await asyncio.to_thread(build_engine, settings, on_progress=_progress(report))
    cache_bytes = sum(buffer.tensor.nbytes for buffer in loaded.engine.pool.buffers.values())
    logger.info(
        "cache: %d pages of 128 tokens and %d slots in %.0f MB; context %d, draft length %d",
        loaded.num_pages,
        loaded.num_slots,
        cache_bytes / 1e6,
        loaded.max_context_length,
        loaded.engine.config.draft_length,
    )
    report(Phase(name="warm-up"))
    await asyncio.to_thread(warm_up, loaded)
    return loaded


async def run_both(settings: AllSettings, report: Report, stop: asyncio.Event) -> None:
    """The router and one decode worker that computes prompts, over this machine's loopback."""
    require_free(settings.router.host, settings.router.port, "--port")
    (port,) = free_ports("127.0.0.1", 1)
    decode = settings.decode.model_copy(
        update={"host": "127.0.0.1", "port": port, "computes_prompts": True}
    )
    router = settings.router.model_copy(
        update={"prefill_workers": (), "decode_workers": (f"127.0.0.1:{port}",)}
    )
    settings = settings.model_copy(update={"decode": decode, "router": router})

    worker_ready, worker_stop = asyncio.Event(), asyncio.Event()

    def worker_report(event: Event) -> None:
        if isinstance(event, Ready):
            worker_ready.set()
        else:
            report(event)

    async def route() -> None:
        # The router finishes its requests before it ends, for which it needs the worker.
        try:
            await _first_of(worker_ready, stop)
            if worker_ready.is_set():
                await run_router(settings, report, stop)
        finally:
            worker_stop.set()

    async with asyncio.TaskGroup() as services:
        services.create_task(run_decode(settings, worker_report, worker_stop))
        services.create_task(route())


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _ready(report: Report) -> Callable[[str], None]:
    def ready(address: str) -> None:
        settle()
        report(Ready(address=address))

    return ready


def settle() -> None:
    """What start-up leaves behind lives as long as the process: no collection looks at it again.

    It is a third of a million objects, and looking at them stops every thread of a worker for a tenth of a second.
    """
    gc.collect()
    gc.freeze()


def _telling(startup: Startup, report: Report) -> Report:
    def both(event: Event) -> None:
        match event:
            case Phase():
                startup.begin(event.name)
            case Progress():
                startup.loading(event.done_bytes, event.total_bytes)
        report(event)

    return both


def _progress(report: Report) -> Callable[[int, int], None]:
    """Reports bytes as often as an eye can follow, and the next phase when all are there."""
    last = float("-inf")

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done_bytes < total_bytes and now - last < PROGRESS_PERIOD_S:
            return
        last = now
        report(Progress(done_bytes=done_bytes, total_bytes=total_bytes))
        if done_bytes >= total_bytes:
            report(Phase(name="cache"))

    return progress
