"""How long a hand-off takes through the three services, and how much of that is the wire. Knows the SDK and metrics."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import dspark
from benchmarks.deployments import deployed
from benchmarks.prompts import load_prompts
from benchmarks.suite import tokens_of
from common.tokenizer import Tokenizer
from services.cli.ports import free_ports

NUM_TOKENS = 512
CONCURRENCY = 4
NUM_REQUESTS = 64
WIRE = "dspark_kv_transfer_duration_seconds"
HANDOFF = "dspark_kv_handoff_duration_seconds"
EDGES_S = (0.01, 0.025)
"""Bounds of the metric's buckets, so the share of hand-offs within them is exact."""
TIMEOUT_S = 60.0
MAX_ANSWER_BYTES = 16 << 20
STOP = dspark.StopParams(max_tokens=32, ignore_eos=True)
"""A request that ends within its first round may be over before the router has heard of its hand-off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderTotals:
    """What the prefill worker has counted so far; a hand-off is from its first token to the acknowledgement."""

    num_handoffs: float
    handoff_s: float
    wire_s: float
    """From posting to arrival, all writes together."""
    num_within: tuple[float, ...]
    """Hand-offs that took no longer than each of `EDGES_S`."""

    @classmethod
    def of(cls, exposition: str) -> SenderTotals:
        """From the text that a metrics port answers."""
        totals: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                totals[sample.name + sample.labels.get("le", "")] += sample.value
        return cls(
            num_handoffs=totals[f"{HANDOFF}_count"],
            handoff_s=totals[f"{HANDOFF}_sum"],
            wire_s=totals[f"{WIRE}_sum"],
            num_within=tuple(totals[f"{HANDOFF}_bucket{edge}"] for edge in EDGES_S),
        )


async def run_handoffs(
    model: str, checkpoint_dir: Path, say: Callable[[str], None]
) -> dict[str, str | float]:
    """Figures by name, as requests see hand-offs and as the prefill worker does."""
    prompts = _prompts(checkpoint_dir, CONCURRENCY + NUM_REQUESTS)
    (admin_port,) = free_ports("127.0.0.1", 1)
    async with (
        deployed(model, speculate=True, prefill_admin_port=admin_port) as address,
        dspark.AsyncClient(address) as client,
    ):
        say("hand-offs: warming up")
        await _ask(client, prompts[:CONCURRENCY])
        say(f"hand-offs: {NUM_REQUESTS} prompts of {NUM_TOKENS} tokens, {CONCURRENCY} at once")
        before = await asyncio.to_thread(_totals, admin_port)
        completions = await _ask(client, prompts[CONCURRENCY:])
        after = await asyncio.to_thread(_totals, admin_port)
    engines = {c.route.transfer_engine for c in completions} - {""}
    return {
        "transfer.handoff.engine": "+".join(sorted(engines)),
        **request_figures([c.timings.handoff_s for c in completions]),
        **sender_figures(before, after),
    }


def request_figures(handoffs_s: Sequence[float]) -> dict[str, float]:
    """What the router waits from a first token until the decode worker has the request; 0 when it had it before."""
    percentiles = statistics.quantiles(handoffs_s, n=100, method="inclusive")
    return {"transfer.handoff.p50_s": percentiles[49], "transfer.handoff.p99_s": percentiles[98]}


def sender_figures(before: SenderTotals, after: SenderTotals) -> dict[str, float]:
    """Means, as only sums are counted, and the shares of quick hand-offs."""
    count = after.num_handoffs - before.num_handoffs
    mean_s = (after.handoff_s - before.handoff_s) / count
    wire_mean_s = (after.wire_s - before.wire_s) / count
    shares = {
        f"transfer.handoff.within_{edge_s * 1000:.0f}ms": (late - early) / count
        for edge_s, early, late in zip(EDGES_S, before.num_within, after.num_within, strict=True)
    }
    return {
        "transfer.handoff.mean_s": mean_s,
        "transfer.handoff.wire_mean_s": wire_mean_s,
        "transfer.handoff.beyond_wire_mean_s": mean_s - wire_mean_s,
        **shares,
    }


def _prompts(checkpoint_dir: Path, count: int) -> list[list[int]]:
    """Prompts of equal length, none like another."""
    tokenizer = Tokenizer.from_folder(checkpoint_dir)
    text = [token for prompt in load_prompts() for token in tokens_of(tokenizer, prompt)]
    endless = itertools.cycle(text)
    return [
        list(itertools.islice(endless, NUM_TOKENS + index % 7))[:NUM_TOKENS]
        for index in range(count)
    ]


async def _ask(
    client: dspark.AsyncClient, prompts: Sequence[Sequence[int]]
) -> list[dspark.Completion]:
    """All answers."""
    waiting = list(prompts)
    completions: list[dspark.Completion] = []

    async def client_loop() -> None:
        while waiting:
            completions.append(await client.generate(waiting.pop(), stop=STOP, timeout=TIMEOUT_S))

    await asyncio.gather(*(client_loop() for _ in range(CONCURRENCY)))
    return completions


def _totals(admin_port: int) -> SenderTotals:
    url = f"http://127.0.0.1:{admin_port}/metrics"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return SenderTotals.of(answer.read(MAX_ANSWER_BYTES).decode())
