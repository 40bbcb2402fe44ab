"""How each service is run in this process, with its start reported phase by phase. Knows the services; no signals.

What can be refused before the heavy imports is refused before them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.checkpoint.folder import checkpoint_folder
from services.cli.configs import decode_config, prefill_config, router_config
from services.cli.events import Event, Phase, Progress, Ready, Report
from services.cli.ports import free_ports, require_free
from services.cli.settings import AllSettings

if TYPE_CHECKING:
    from common.engine.build import EngineSettings, LoadedEngine

logger = logging.getLogger(__name__)

PROGRESS_PERIOD_S = 0.05


async def run_router(settings: AllSettings, report: Report, stop: asyncio.Event) -> None:
    require_free(settings.router.host, settings.router.port, "--router.port")
    checkpoint_folder(settings.model)
    report(Phase(name="import"))
    from services.router.app import serve

    report(Phase(name="workers"))
    await serve(router_config(settings), ready=_ready(report), stop=stop)


async def run_prefill(settings: AllSettings, report: Report, stop: asyncio.Event) -> None:
    require_free(settings.prefill.host, settings.prefill.port, "--prefill.port")
    checkpoint_folder(settings.model)
    report(Phase(name="import"))
    from services.prefill.app import serve

    config = prefill_config(settings)
    loaded = await _loaded(config.engine, report)
    await serve(config, ready=_ready(report), stop=stop, loaded=loaded)


async def run_decode(settings: AllSettings, report: Report, stop: asyncio.Event) -> None:
    require_free(settings.decode.host, settings.decode.port, "--decode.port")
    checkpoint_folder(settings.model)
    report(Phase(name="import"))
    from services.decode.app import serve

    config = decode_config(settings)
    loaded = await _loaded(config.engine, report)
    await serve(config, ready=_ready(report), stop=stop, loaded=loaded)


async def _loaded(settings: EngineSettings, report: Report) -> LoadedEngine:
    """An engine whose first steps are behind it: those compile kernels, which a request must not wait for."""
    from common.engine.build import build_engine
    from common.engine.warm_up import warm_up

    report(Phase(name="weights"))
    loaded = await asyncio.to_thread(build_engine, settings, on_progress=_progress(report))
    cache_bytes = sum(buffer.tensor.nbytes for buffer in loaded.engine.pool.buffers.values())
    logger.info(
        "cache: %d pages of 128 tokens and %d slots in %.0f MB; context %d, draft length %d",
        loaded.num_pages,
        loaded.num_slots,
        cache_bytes / 1e6,
        loaded.engine.config.max_context_length,
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
    return lambda address: report(Ready(address=address))


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
