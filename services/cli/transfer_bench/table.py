"""Results for people: one table and one sentence an engine. Knows rich; measures nothing."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from services.cli.transfer_bench.limits import limit_of
from services.cli.transfer_bench.patterns import Pattern, size_name
from services.cli.transfer_bench.results import Rate, Results


def show(console: Console, results: Results) -> None:
    console.print(_table(results))
    for engine in results.engines:
        console.print(f"{engine}: {limit_of(results, engine)}", highlight=False, markup=False)
    for engine, why in results.missing.items():
        console.print(f"{engine}: not measured: {why}", highlight=False, markup=False)


def _table(results: Results) -> Table:
    where = "two processes of this machine" if results.is_one_host else "two machines"
    table = Table(title=f"transfer between {where}", title_justify="left")
    for name in ("size", "ranges", "by", "GB/s", "of link", "of raw TCP", "of memcpy"):
        table.add_column(name, justify="left" if name == "by" else "right", no_wrap=True)
    for size_bytes, memcpy in results.memcpy.items():
        tcp = results.raw_tcp[size_bytes]
        size = size_name(size_bytes)
        ratio = tcp.bytes_per_s / memcpy.bytes_per_s
        table.add_row(size, "", "memcpy", _rate(memcpy), "", f"{1 / ratio:.0%}", "")
        table.add_row(size, "", "raw TCP", _rate(tcp), "", "", f"{ratio:.0%}")
        for pattern in _patterns(results, size_bytes):
            for engine, rates in results.engines.items():
                table.add_row(
                    size,
                    str(pattern.num_ranges),
                    engine,
                    _rate(rates[pattern]),
                    f"{results.link_share(engine, pattern):.0%}",
                    f"{results.over_raw_tcp(engine, pattern):.0%}",
                    f"{results.over_memcpy(engine, pattern):.0%}",
                )
        table.add_section()
    on_memory = " and ".join(filter(results.uses_memory, results.engines))
    table.caption = "medians; the link is raw TCP" + (
        f", for {on_memory} memcpy" if on_memory else ""
    )
    return table


def _patterns(results: Results, size_bytes: int) -> Iterable[Pattern]:
    patterns = {p for rates in results.engines.values() for p in rates}
    return sorted(
        (p for p in patterns if p.size_bytes == size_bytes), key=lambda pattern: pattern.num_ranges
    )


def _rate(rate: Rate) -> str:
    return f"{rate.bytes_per_s / 1e9:.2f}"
