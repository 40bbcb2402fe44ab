"""What holds an engine back, judged from its figures. Knows rates and shares; measures nothing."""

from __future__ import annotations

from collections.abc import Mapping

from services.cli.transfer_bench.patterns import Pattern, size_name
from services.cli.transfer_bench.results import Rate, Results

FULL_SHARE = 0.85
"""Of the link: what is left is not worth a search."""
BULK_BYTES = 16 << 20
"""A smaller transfer shows what a transfer costs more than what its link gives."""
BUSY_CORES = 0.8
"""A process that computes on one thread cannot do more than 1."""
LIKE_TCP = 1.3
"""Times raw TCP's rate: shared memory is well above."""


def limit_of(results: Results, engine: str) -> str:
    """One sentence for people."""
    rates = results.engines[engine]
    # The largest transfer in the fewest pieces shows the link, the smallest in all its pieces shows their cost.
    pattern = max(rates, key=lambda p: (p.size_bytes, -p.num_ranges))
    sentence = _bulk_limit(results, engine, pattern)
    cost_s = range_cost_s(rates)
    if cost_s is not None:
        half_bytes = cost_s * rates[pattern].bytes_per_s
        sentence += f"; a range costs {cost_s * 1e6:.1f} µs, so ranges below {_about(half_bytes)} halve the rate"
    return f"{sentence}."


def range_cost_s(rates: Mapping[Pattern, Rate]) -> float | None:
    """Seconds that one more range adds, at the smallest size; None when it was not measured or drowns in noise."""
    size = min(p.size_bytes for p in rates)
    patterns = [p for p in rates if p.size_bytes == size]
    few = min(patterns, key=lambda p: p.num_ranges)
    many = max(patterns, key=lambda p: p.num_ranges)
    if few.num_ranges == many.num_ranges:
        return None
    cost_s = (rates[many].seconds - rates[few].seconds) / (many.num_ranges - few.num_ranges)
    return cost_s if cost_s > 0 else None


def _bulk_limit(results: Results, engine: str, pattern: Pattern) -> str:
    rate, share = results.engines[engine][pattern], results.link_share(engine, pattern)
    link = "memcpy" if results.uses_memory(engine) else "raw TCP"
    reached = f"{share:.0%} of {link} at {size_name(pattern.size_bytes)}"
    if share >= FULL_SHARE:
        return f"{reached}: the link is the limit"
    if pattern.size_bytes < BULK_BYTES:
        return f"{reached}: the fixed cost of a transfer is the limit; larger ones show the link"
    if results.uses_memory(engine) and results.over_raw_tcp(engine, pattern) < LIKE_TCP:
        return (
            f"{reached}, no more than TCP gives: UCX may have found no shared memory "
            "(another PID namespace, or UCX_TLS)"
        )
    busiest = max(rate.sender_cores, rate.receiver_cores)
    if busiest >= BUSY_CORES:
        side = "sender" if rate.sender_cores == busiest else "receiver"
        return f"{reached}: CPU is the limit, {busiest:.1f} cores at the {side}"
    return (
        f"{reached} with {rate.sender_cores:.1f} cores at the sender and {rate.receiver_cores:.1f} at the receiver: "
        "waiting is the limit, or another process has the cores"
    )


def _about(num_bytes: float) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.0f}{unit}"
    return f"{num_bytes:.0f} bytes"
