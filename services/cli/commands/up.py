"""`dspark up`: a whole deployment on this machine, until a stop signal."""

from __future__ import annotations

import asyncio
import logging

from common.checkpoint.folder import checkpoint_folder, model_name
from common.config import redacted
from common.errors import CheckpointError
from common.telemetry.logging import configure_logging
from services.cli.banner import ready_banner
from services.cli.deployment import run_deployment
from services.cli.failures import EXIT_OK, failure_of
from services.cli.settings import AllSettings
from services.cli.timeline import Timeline

logger = logging.getLogger(__name__)


def run(settings: AllSettings) -> int:
    configure_logging(level=settings.log.level, format=settings.log.format, role="up")
    logger.info("settings that differ from the defaults: %s", redacted(settings))
    require_checkpoint(settings)
    timeline = Timeline()

    async def serve_until_stopped(address: str) -> None:
        print(ready_banner(address, model_name(settings.model), timeline.elapsed_s), flush=True)
        await asyncio.Event().wait()

    asyncio.run(run_deployment(settings, timeline, serve_until_stopped))
    return EXIT_OK


def require_checkpoint(settings: AllSettings) -> None:
    """Say what is missing before processes are started for it."""
    try:
        checkpoint_folder(settings.model)
    except CheckpointError as error:
        raise failure_of(error) from None
