"""`dspark decode`: one decode worker in the foreground."""

from __future__ import annotations

from services.cli.foreground import run_role
from services.cli.roles import run_decode
from services.cli.settings import AllSettings


def run(settings: AllSettings) -> int:
    return run_role("decode", run_decode, settings, num_threads=settings.decode.threads)
