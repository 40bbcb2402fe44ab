"""Figures as a table and as a file. Knows names and units; measures nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

Value = str | int | float


def write(path: Path, figures: Mapping[str, Value]) -> None:
    """One flat JSON object, keys sorted, so that two results can be compared line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in figures.items()
    }
    path.write_text(json.dumps(rounded, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def show(console: Console, figures: Mapping[str, Value]) -> None:
    console.print(_speed_table(figures))
    console.print(_accepted_table(figures))


def show_transfer(console: Console, figures: Mapping[str, Value]) -> None:
    """What limits each engine, and hand-offs; every rate is in the file."""
    for name, value in figures.items():
        if isinstance(value, str) and name.startswith("transfer."):
            console.print(f"{name.removeprefix('transfer.')}: {value}", highlight=False)
    p50, p99, mean, wire = (
        _milliseconds(figures[f"transfer.handoff.{name}"])
        for name in ("p50_s", "p99_s", "mean_s", "wire_mean_s")
    )
    console.print(f"hand-off: p50 {p50}, p99 {p99} for requests")
    console.print(f"hand-off: mean {mean} for the prefill worker, of which the wire {wire}")


def _speed_table(figures: Mapping[str, Value]) -> Table:
    table = Table(title="decode through router, prefill and decode", title_justify="left")
    for name in ("at once", "mode", "tokens/s", "ratio", "chat", "code", "TTFT p50", "p95"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    table.add_row("1", "transformers", _rate(figures["decode.c1.transformers_tokens_per_s"]), "")
    for c in ("c1", "c4", "c16"):
        for mode in ("target", "dspark"):
            ratio = {
                ("c1", "target"): f"{figures['decode.c1.target_over_transformers']:.2f}×",
            }.get((c, mode), "")
            domains = ["", ""]
            if mode == "dspark":
                ratio = f"{figures[f'decode.{c}.dspark_over_target']:.2f}×"
                domains = [
                    f"{figures[f'decode.{c}.{domain}.dspark_over_target']:.2f}×"
                    for domain in ("chat", "code")
                ]
            table.add_row(
                c[1:],
                "target" if mode == "target" else "DSpark",
                _rate(figures[f"decode.{c}.{mode}_tokens_per_s"]),
                ratio,
                *domains,
                _milliseconds(figures[f"ttft.{c}.{mode}.p50_s"]),
                _milliseconds(figures[f"ttft.{c}.{mode}.p95_s"]),
            )
    table.caption = (
        "tokens/s: after first tokens; ratio: to the row above it; chat, code: per request"
    )
    return table


def _accepted_table(figures: Mapping[str, Value]) -> Table:
    table = Table(title="accepted length on unseen prompts", title_justify="left")
    for name in ("", "greedy", "T=1", "T=1, seeded"):
        table.add_column(name, justify="right" if name else "left")
    for domain in ("chat", "code"):
        names = ("greedy", "t1", "t1_coupled")
        lengths = [f"{figures[f'accepted_length.{domain}.{name}']:.2f}" for name in names]
        table.add_row(domain, *lengths)
    return table


def _rate(value: Value) -> str:
    return f"{value:.0f}"


def _milliseconds(value: Value) -> str:
    assert not isinstance(value, str)
    return f"{value * 1000:.0f} ms"
