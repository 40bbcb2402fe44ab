"""`dspark bench transfer`: what share of the link each transfer engine reaches, and what limits it."""

from __future__ import annotations

import asyncio
import json
import sys

from rich.console import Console

from common.config import limit_threads
from common.errors import ConfigError
from common.telemetry.logging import configure_logging
from services.cli.bench_settings import TransferBenchSettings
from services.cli.events import Ready, Report
from services.cli.failures import EXIT_OK, Failure
from services.cli.foreground import run_role
from services.cli.process import leave
from services.cli.settings import AllSettings
from services.cli.transfer_bench.patterns import parse_patterns
from services.cli.transfer_bench.request import Request


def run(settings: TransferBenchSettings) -> int:
    if settings.serve:
        return _serve(settings)
    request = Request(
        engines=settings.engines,
        patterns=parse_patterns(settings.sizes, settings.ranges),
        repeats=settings.repeats,
    )
    # That an engine is missing is in the table.
    configure_logging(level="error", format=settings.log.format, role="bench")
    limit_threads(1)
    from services.cli.transfer_bench.limits import limit_of
    from services.cli.transfer_bench.local import measure_here
    from services.cli.transfer_bench.measure import measure
    from services.cli.transfer_bench.table import show

    progress = Console(stderr=True)

    def say(what: str) -> None:
        progress.print(f"[dim]{what}[/dim]", highlight=False)

    measuring = (
        measure(request, settings.peer, is_one_host=False, say=say)
        if settings.peer
        else measure_here(request, say)
    )
    try:
        results = asyncio.run(measuring)
    except Failure as failure:
        print(f"dspark bench transfer: {failure.cause}", file=sys.stderr)
        leave(failure.exit_code)
    if settings.output == "json":
        limits = {engine: limit_of(results, engine) for engine in results.engines}
        print(
            json.dumps(
                {"figures": results.figures(), "limits": limits, "missing": dict(results.missing)},
                ensure_ascii=False,
            )
        )
    else:
        show(Console(), results)
    leave(EXIT_OK)


def _serve(settings: TransferBenchSettings) -> int:
    host, _, port = settings.serve.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"serve is {settings.serve!r}; give host:port")

    async def role(_: AllSettings, report: Report, stop: asyncio.Event) -> None:
        from services.cli.transfer_bench.peer import serve_peer

        def ready(address: str) -> None:
            report(Ready(address=address))
            if settings.status_fd is None:
                print(f"receiver at {address}: dspark bench transfer --peer {address}", flush=True)

        await serve_peer(host, int(port), ready=ready, stop=stop)

    return run_role("receiver", role, settings, num_threads=1)
