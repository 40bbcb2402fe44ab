"""`dspark serve`: everything in one process, without a hand-off; the baseline of every comparison."""

from __future__ import annotations

from services.cli.foreground import run_role
from services.cli.roles import run_both
from services.cli.settings import AllSettings


def run(settings: AllSettings) -> int:
    return run_role(
        "serve", run_both, settings, num_threads=settings.decode.threads, is_entrance=True
    )
