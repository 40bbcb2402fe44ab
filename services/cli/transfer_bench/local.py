"""A receiver on this machine for the time of a measurement, as a process of its own. Knows processes; no engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from common.config import child_environment
from services.cli.children import Child
from services.cli.failures import EXIT_OTHER, Failure
from services.cli.transfer_bench.measure import Say, measure
from services.cli.transfer_bench.request import Request
from services.cli.transfer_bench.results import Results

READY_S = 60.0
STOP_S = 5.0


async def measure_here(request: Request, say: Say) -> Results:
    """Measure towards a receiver that is started for it. Raises Failure when it does not start or dies."""
    say("starting a receiver")
    async with _local_peer() as (address, death):
        measuring = asyncio.ensure_future(measure(request, address, is_one_host=True, say=say))
        try:
            await asyncio.wait((measuring, death), return_when=asyncio.FIRST_COMPLETED)
            if not measuring.done():
                raise death.result()
            return measuring.result()
        finally:
            measuring.cancel()
            await asyncio.wait((measuring,))


@contextlib.asynccontextmanager
async def _local_peer() -> AsyncIterator[tuple[str, asyncio.Future[Failure]]]:
    """(its address, what sets when it dies)."""
    child = await Child.start(
        "receiver",
        ["bench", "transfer", "--serve", "127.0.0.1:0", "--log.level", "warning"],
        child_environment(1),
        lambda event: None,
    )
    death = asyncio.ensure_future(child.death())
    try:
        await asyncio.wait(
            (child.ready, death), timeout=READY_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not child.ready.done():
            raise (
                death.result()
                if death.done()
                else Failure(
                    f"the receiver was not ready after {READY_S:.0f} s", exit_code=EXIT_OTHER
                )
            )
        yield child.ready.result(), death
    finally:
        death.cancel()
        await child.stop(STOP_S)
