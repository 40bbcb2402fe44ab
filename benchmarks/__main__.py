"""`python -m benchmarks [main|engine|load|mesh|metrics|products|tracing|transfer]`: measure, print a table, write `benchmarks/results/<name>.json`."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from benchmarks import overheads, report
from benchmarks.collectives import run_collectives
from benchmarks.engine import run_engine
from benchmarks.environment import environment
from benchmarks.handoffs import run_handoffs
from benchmarks.loading import run_loading
from benchmarks.metrics import run_metrics
from benchmarks.products import run_products
from benchmarks.suite import Effort, run_main
from benchmarks.tracing import run_tracing
from benchmarks.transfer import run_transfer
from common.checkpoint.folder import DEFAULT_MODEL, checkpoint_folder
from services.cli.process import leave

RESULTS = Path(__file__).with_name("results")
QUICK = Effort(turns_alone=1, turns_together=1, every=6, sampled=1)


def main() -> int:
    options = _options()
    console = Console()
    if not console.is_terminal:
        console.width = 100
    began = time.monotonic()

    def say(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:5.0f} s  {what}[/dim]", highlight=False)

    checkpoint_dir = checkpoint_folder(options.model)
    before = environment()
    figures: Mapping[str, report.Value]
    if options.name == "engine":
        figures = run_engine(checkpoint_dir, say)
    elif options.name == "load":
        figures = run_loading(checkpoint_dir, say)
    elif options.name == "mesh":
        figures = run_collectives(checkpoint_dir, say)
    elif options.name == "metrics":
        figures = run_metrics(checkpoint_dir, say, num_turns=2 if options.quick else 8)
    elif options.name == "products":
        figures = run_products(say)
    elif options.name == "tracing":
        figures = run_tracing(checkpoint_dir, say, num_turns=3 if options.quick else 9)
    elif options.name == "transfer":
        say("transfer engines, memcpy, raw TCP and bare NIXL")
        counts = overheads.QUICK if options.quick else overheads.Counts()
        figures = {
            **run_transfer(1 if options.quick else 5),
            **asyncio.run(run_handoffs(str(checkpoint_dir), checkpoint_dir, say)),
            **asyncio.run(
                overheads.run_overheads(str(checkpoint_dir), checkpoint_dir, say, counts)
            ),
        }
        report.show_transfer(console, figures)
    else:
        effort = QUICK if options.quick else Effort()
        figures = asyncio.run(run_main(str(checkpoint_dir), checkpoint_dir, effort, say))
        report.show(console, figures)
    results = {**before, **figures, "environment.benchmark_s": time.monotonic() - began}
    path = options.results / f"{options.name}.json"
    report.write(path, results)
    console.print(f"written to {path}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "name",
        nargs="?",
        default="main",
        choices=("main", "engine", "load", "mesh", "metrics", "products", "tracing", "transfer"),
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="checkpoint folder or shipped name")
    parser.add_argument("--quick", action="store_true", help="once through, for a first look")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    leave(main())  # libraries of transfer engines may crash when theirs ends
