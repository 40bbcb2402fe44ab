"""Why a process ended, left where an orchestrator looks for it. Knows a file; prints nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from services.cli.events import Event, Failed, Phase, Ready, Report

logger = logging.getLogger(__name__)

MAX_BYTES = 4096
"""What Kubernetes shows of a termination message."""


def with_last_words(
    report: Report, path: Path, name: str, clock: Callable[[], float] = time.monotonic
) -> Report:
    """`report`, which also writes one paragraph to `path` when the process fails: what it did, for how long, and the cause.

    A path that cannot be written is a warning, for there is another cause to tell of.
    """
    began = clock()
    phase = "process"

    def both(event: Event) -> None:
        nonlocal phase
        match event:
            case Phase(name=phase):
                pass
            case Ready():
                phase = "serving"
            case Failed(cause=cause):
                _write(
                    path, f"dspark {name} failed after {clock() - began:.0f} s ({phase}): {cause}\n"
                )
            case _:
                pass
        report(event)

    return both


def _write(path: Path, paragraph: str) -> None:
    try:
        path.write_bytes(paragraph.encode()[:MAX_BYTES])
    except OSError as error:
        logger.warning("cannot write the cause to %s: %s", path, error.strerror)
