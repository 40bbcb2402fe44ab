"""A service command: logging, threads, reports and the run itself, for a terminal or for a supervising parent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from common.checkpoint.folder import model_name
from common.config import limit_threads, num_cores, redacted
from common.telemetry.logging import configure_logging
from services.cli.banner import ready_banner
from services.cli.events import Event, Ready, Report, pipe_report
from services.cli.last_words import with_last_words
from services.cli.process import run_service
from services.cli.settings import AllSettings
from services.cli.timeline import Timeline

logger = logging.getLogger(__name__)

Role = Callable[[AllSettings, Report, asyncio.Event], Awaitable[None]]


def run_role(
    name: str,
    role: Role,
    settings: AllSettings,
    *,
    num_threads: int | None,
    is_entrance: bool = False,
) -> int:
    """Run a service until it is stopped or fails; returns the exit code.

    `num_threads` None takes every core. An entrance is where clients connect; a person is told how.
    """
    configure_logging(level=settings.log.level, format=settings.log.format, role=name)
    logger.info("settings that differ from the defaults: %s", redacted(settings))
    is_supervised = settings.status_fd is not None
    if not is_supervised:
        # A supervising parent has said so in the environment already.
        limit_threads(num_threads or num_cores())
    report = _report(name, settings, is_entrance)
    if settings.termination_log is not None:
        report = with_last_words(report, settings.termination_log, name)
    return run_service(
        lambda stop: role(settings, report, stop),
        program=f"dspark {name}",
        report=report,
        shutdown_s=settings.shutdown_s,
        is_supervised=is_supervised,
    )


def _report(name: str, settings: AllSettings, is_entrance: bool) -> Report:
    if settings.status_fd is not None:
        return pipe_report(settings.status_fd)
    timeline = Timeline()
    show = timeline.reporter(name)

    def report(event: Event) -> None:
        show(event)
        if is_entrance and isinstance(event, Ready):
            model = model_name(settings.model)
            print(ready_banner(event.address, model, timeline.elapsed_s), flush=True)

    return report
