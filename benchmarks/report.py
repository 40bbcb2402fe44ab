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
    for title, name in (
        ("hand-off as the router waits for it", "handoff"),
        ("hand-off beyond the wire, to the acknowledgement", "handoff.beyond_wire"),
        ("hand-off beyond the wire, to running", "handoff.request_beyond_wire"),
        ("first verified round after the first token", "handoff.first_round"),
        ("on the wire, overlapped or not", "handoff.wire"),
    ):
        p50, p99 = (_milliseconds(figures[f"transfer.{name}.{p}_s"], 1) for p in ("p50", "p99"))
        console.print(f"{title}: p50 {p50}, p99 {p99}", highlight=False)
    usual, most = (
        _milliseconds(figures[f"transfer.cold_pair.penalty_{p}_s"], 1) for p in ("p50", "max")
    )
    console.print(f"workers that never met: later by {usual}, at most {most}", highlight=False)
    for name, value in figures.items():
        if name.endswith("late_share_max") and not isinstance(value, str):
            handoffs = name.removeprefix("transfer.").removesuffix(".late_share_max")
            console.print(f"{handoffs}: {value:.0%} at most arrives after the first proposal")
        if name.endswith(".over_bare") and not isinstance(value, str):
            pattern = name.removeprefix("transfer.nixl.").removesuffix(".over_bare")
            console.print(f"nixl: {value:.0%} of what bare NIXL gives ({pattern})", highlight=False)


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


def _milliseconds(value: Value, digits: int = 0) -> str:
    assert not isinstance(value, str)
    return f"{value * 1000:.{digits}f} ms"
