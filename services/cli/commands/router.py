"""`dspark router`: the router in the foreground."""

from __future__ import annotations

from services.cli.foreground import run_role
from services.cli.roles import run_router
from services.cli.settings import AllSettings


def run(settings: AllSettings) -> int:
    return run_role("router", run_router, settings, num_threads=1, is_entrance=True)
