"""One service in this process, from its start to its exit code. Knows signals, deadlines and reports; not services."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from common.errors import WorkerLost
from services.cli.events import Failed, Report
from services.cli.failures import EXIT_OK, EXIT_OTHER, failure_of
from services.cli.signals import StopSignals

logger = logging.getLogger(__name__)

HURRY_S = 2.0
"""What a service gets to let go after it was cancelled."""
STOP_MARGIN_S = 5.0
"""What a service gets beyond the time that it allows its requests."""

Serve = Callable[[asyncio.Event], Awaitable[None]]
"""Runs until the event is set, then finishes its requests and returns."""


def run_service(
    serve: Serve, *, program: str, report: Report, shutdown_s: float, is_supervised: bool
) -> NoReturn:
    """Run until a stop signal or a failure, which is reported; then end this process with the exit code.

    The first signal lets running requests finish for `shutdown_s` seconds, the second ends everything. A supervised
    process also stops when its parent is gone, and leaves it to the parent to tell people of a failure; otherwise
    `program` is said to have failed.
    """
    faulthandler.enable()
    try:
        asyncio.run(_run(serve, shutdown_s, is_supervised))
    except Exception as error:
        failure = failure_of(error)
        # A rank that was lost is named with its cause; a trace says only how that was noticed.
        is_rank_lost = any(isinstance(each, WorkerLost) for each in (error, error.__cause__))
        if failure.exit_code == EXIT_OTHER and not is_rank_lost:
            logger.exception("the service failed")
        report(Failed(cause=failure.cause, exit_code=failure.exit_code))
        if not is_supervised:
            print(f"{program}: {failure.cause}", file=sys.stderr)
        leave(failure.exit_code)
    raise AssertionError("a service that ended well has left")


def leave(exit_code: int) -> NoReturn:
    """Exit now: threads that compute or load cannot be cancelled, and the interpreter would wait for them.

    Libraries of transfer engines may crash in their exit handlers besides, when all work has long been done.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


async def _run(serve: Serve, shutdown_s: float, is_supervised: bool) -> NoReturn:
    began = time.monotonic()
    signals = StopSignals()
    if is_supervised:
        signals.watch_parent()
    service = asyncio.ensure_future(serve(signals.stop))
    stop = asyncio.ensure_future(signals.stop.wait())
    hurry = asyncio.ensure_future(signals.hurry.wait())
    await asyncio.wait({service, stop}, return_when=asyncio.FIRST_COMPLETED)
    if not service.done():
        await asyncio.wait(
            {service, hurry},
            timeout=shutdown_s + STOP_MARGIN_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
    if not service.done():
        service.cancel()
        await asyncio.wait({service}, timeout=HURRY_S)
        logger.warning(
            "ended before its requests did, %.0f s after its start", time.monotonic() - began
        )
        leave(EXIT_OK if service.done() else EXIT_OTHER)
    stop.cancel()
    hurry.cancel()
    await service
    # The loop's end would wait for threads, and a start that was stopped may have one that loads for hours.
    leave(EXIT_OK)
