"""What tracing costs: the same load with it off, with every trace sampled out, and with every request traced, in turns.

Knows tracing; serves nothing itself. As with metrics, services and clients share this process.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from benchmarks.load import drive
from benchmarks.metrics import CONCURRENCY, system
from benchmarks.prompts import load_prompts
from common.telemetry.otel import OtelTracing
from common.telemetry.tracing import Span


class Switched:
    """A role's tracing whose share of traces is chosen between runs."""

    is_on = True

    def __init__(self, role: str) -> None:
        self._by_ratio = {
            ratio: OtelTracing(role=role, version="0", sample_ratio=ratio, exporter=_Nowhere())
            for ratio in (0.0, 1.0)
        }
        self.ratio = 0.0

    def begin(self, name: str, *, traceparent: str = "", began: float | None = None) -> Span | None:
        return self._by_ratio[self.ratio].begin(name, traceparent=traceparent, began=began)

    def join(self, name: str, *, traceparent: str, began: float | None = None) -> Span | None:
        return self._by_ratio[self.ratio].join(name, traceparent=traceparent, began=began)

    def close(self) -> None:
        for tracing in self._by_ratio.values():
            tracing.close()


class _Nowhere(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def run_tracing(
    checkpoint_dir: Path, say: Callable[[str], None], *, num_turns: int
) -> dict[str, float]:
    """Throughput with tracing over throughput without it, for traces that are dropped and for traces that are kept."""
    torch.set_num_threads(1)
    return asyncio.run(_run(checkpoint_dir, say, num_turns))


async def _run(
    checkpoint_dir: Path, say: Callable[[str], None], num_turns: int
) -> dict[str, float]:
    prompts = [prompt for prompt in load_prompts() if prompt.is_unseen]
    tracings: list[Switched] = []
    ratios: dict[str, list[float]] = {"sampled_out": [], "traced": []}

    def tracing(role: str) -> Switched:
        tracings.append(Switched(role))
        return tracings[-1]

    async with system(checkpoint_dir) as (plain, _), system(checkpoint_dir, tracing) as (traced, _):

        async def run(mode: str) -> float:
            for switched in tracings:
                switched.ratio = float(mode == "traced")
            address = plain if mode == "off" else traced
            return (await drive(address, prompts, concurrency=CONCURRENCY)).total_tokens_per_s

        say("warming up")
        for address in (plain, traced):
            await drive(address, prompts[:4], concurrency=4, max_tokens=24)
        modes = ["off", "sampled_out", "traced"]
        for turn in range(num_turns):
            # Whatever drifts meets every mode in every place.
            order = modes[turn % 3 :] + modes[: turn % 3]
            rates = {mode: await run(mode) for mode in order}
            for mode, found in ratios.items():
                found.append(rates[mode] / rates["off"])
            say(
                f"turn {turn + 1}/{num_turns}: {', '.join(f'{m} {r:.0f}' for m, r in rates.items())}"
            )
    for switched in tracings:
        switched.close()
    return {
        name: figure
        for mode, found in ratios.items()
        for name, figure in (
            (f"tracing.{mode}_ratio", statistics.median(found)),
            (f"tracing.{mode}_ratio_spread", max(found) - min(found)),
        )
    }
