"""`dspark prefill`: one prefill worker in the foreground."""

from __future__ import annotations

from services.cli.foreground import run_role
from services.cli.roles import run_prefill
from services.cli.settings import AllSettings


def run(settings: AllSettings) -> int:
    return run_role("prefill", run_prefill, settings, num_threads=settings.prefill.threads)
