"""`python -m tools.observe`: watch a local cluster under load with a real Prometheus, print what came of it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from common.checkpoint.folder import DEFAULT_MODEL
from tools.observe.prometheus import missing_tools
from tools.observe.watch import Watched, watch


def main() -> int:
    """Returns 1 when something is missing, empty or failing, 2 where there is no Prometheus."""
    options = _options()
    if missing := missing_tools():
        print(f"{', '.join(missing)} cannot be found; Debian's package is called prometheus")
        return 2
    watched = asyncio.run(
        watch(options.model, seconds=options.seconds, interval_s=options.interval)
    )
    _show(Console(), watched)
    return 1 if watched.findings.faults else 0


def _show(console: Console, watched: Watched) -> None:
    findings = watched.findings
    table = Table("what", "asked", "wrong", title="What Prometheus saw")
    table.add_row("requests", str(watched.endings.total()), "")
    for kind, number in sorted(watched.endings.items()):
        table.add_row(f"  {kind}", str(number), "")
    table.add_row("families shown", str(findings.num_families), str(len(findings.absent)))
    table.add_row("families moved", str(findings.num_movable), str(len(findings.unmoved)))
    table.add_row(
        "panels' expressions", str(findings.num_panel_expressions), _num(findings.empty_panels)
    )
    table.add_row("rules' expressions", str(findings.num_rules), _num(findings.empty_rules))
    table.add_row("rules evaluated", str(findings.num_rules), str(len(findings.failing)))
    console.print(table)
    for fault in findings.faults:
        console.print(fault, style="red", highlight=False)
    console.print(f"alerts: {', '.join(findings.alerts) or 'none'}", highlight=False)


def _num(things: Iterable[str]) -> str:
    return str(len(tuple(things)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="checkpoint, as `dspark up` takes it"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="time under load")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between scrapes")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
