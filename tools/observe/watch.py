"""One observed run from a cluster's start to its findings. Knows the order."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

from tools.observe import traffic
from tools.observe.cluster import NAMESPACE, running_cluster
from tools.observe.expressions import rule_files
from tools.observe.findings import Findings, examine
from tools.observe.prometheus import Prometheus, running_prometheus

SCRAPES_BEFORE_LOAD = 2
"""So that every figure is seen at rest before it moves."""
SCRAPES_WITHIN_S = 60.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What a run gave."""

    endings: Counter[str]
    """How requests ended, by kind."""
    findings: Findings


async def watch(model: str, *, seconds: float, interval_s: float = 1.0) -> Watched:
    """Start a cluster and a Prometheus, put load on the one for `seconds`, and ask the other."""
    async with running_cluster(model) as cluster:
        with running_prometheus(cluster.targets, rule_files(), interval_s=interval_s) as server:
            await _until_scraped(server, len(cluster.targets), times=SCRAPES_BEFORE_LOAD)
            endings = await traffic.drive(cluster.address, seconds)
            await _until_scraped(server, len(cluster.targets), times=SCRAPES_BEFORE_LOAD)
            findings = await asyncio.to_thread(examine, server, namespace=NAMESPACE, model=model)
    return Watched(endings=endings, findings=findings)


async def _until_scraped(server: Prometheus, num_targets: int, *, times: int) -> None:
    """Wait until each target answered `times` more scrapes and the rules saw that. Raises TimeoutError."""
    deadline = time.monotonic() + SCRAPES_WITHIN_S
    wanted = await asyncio.to_thread(_num_rounds, server, num_targets) + times
    while await asyncio.to_thread(_num_rounds, server, num_targets) < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not {times} scrapes of {num_targets} targets")
        await asyncio.sleep(POLL_S)


def _num_rounds(server: Prometheus, num_targets: int) -> int:
    """How often the target that was scraped least was, or the rules were evaluated, if that is less."""
    ages = server.query("sum_over_time(up[1h])")
    rules = server.query("count_over_time(dspark:threshold:availability[1h])")
    if len(ages) < num_targets or not rules:
        return 0
    return round(min(series.value for series in (*ages, *rules)))
