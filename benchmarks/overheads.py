"""What hand-offs cost beside the wire, per hand-off: of met workers, of workers that never met, and of long prompts."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.by_hand import HandedOver, WorkerPair, worker_pair
from benchmarks.deployments import workers
from benchmarks.handoffs import token_prompts
from common.engine.build import LoadedEngine, build_engine
from services.cli.configs import decode_config
from services.cli.settings import AllSettings
from services.decode.app import serve as serve_decode

NUM_TOKENS = 512
CONCURRENCY = 4
LONG_TOKENS = 4064
"""As near to 4096 as the shipped model's limit allows with a few tokens to follow."""
SHORT_TOKENS = 16
"""Computed in less time than a meeting takes, so that nothing hides it."""
GENERATED = 32
READY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How often each is measured."""

    met: int = 256
    long: int = 8
    cold: int = 16


QUICK = Counts(met=24, long=2, cold=3)

Say = Callable[[str], None]
Figures = dict[str, float]


async def run_overheads(
    model: str, checkpoint_dir: Path, say: Say, counts: Counts = Counts()
) -> Figures:
    """Figures by name."""
    prompts = token_prompts(checkpoint_dir, NUM_TOKENS, CONCURRENCY + counts.met)
    long_prompts = token_prompts(checkpoint_dir, LONG_TOKENS, counts.long)
    short_prompts = token_prompts(checkpoint_dir, SHORT_TOKENS, 2 * counts.cold + 2)
    async with workers(model, "prefill", "decode") as addresses, worker_pair(*addresses) as pair:
        await pair.introduce()
        await _run_all(pair, prompts[:CONCURRENCY])
        say(f"hand-offs: {counts.met} prompts of {NUM_TOKENS} tokens, {CONCURRENCY} at once")
        met = await _run_all(pair, prompts[CONCURRENCY:])
        say(f"hand-offs: {counts.long} prompts of {LONG_TOKENS} tokens, one at a time")
        longs = [await pair.run(prompt, num_tokens=8) for prompt in long_prompts]
    say(f"hand-offs: {counts.cold} decode workers that are new to their prefill worker")
    cold, warm = await _cold_pairs(model, short_prompts, counts.cold)
    return {
        **overhead_figures(met),
        **share_figures(f"long_handoff.{LONG_TOKENS}_tokens", longs),
        **penalty_figures(cold, warm),
    }


def overhead_figures(handoffs: Sequence[HandedOver]) -> Figures:
    """A hand-off is from the first proposal to the acknowledgement; for a request, from hearing its first token, behind which
    the proposal is still to be drafted, to hearing that decode runs it."""
    return {
        **_percentiles("handoff.duration", [h.done.handoff_s for h in handoffs]),
        **_percentiles("handoff.beyond_wire", [h.done.handoff_s - h.done.wire_s for h in handoffs]),
        **_percentiles(
            "handoff.request_beyond_wire",
            [max(0.0, h.admitted_s - h.done.wire_s) for h in handoffs],
        ),
        **_percentiles("handoff.first_round", [h.verified_s for h in handoffs]),
        **_percentiles("handoff.wire", [h.done.total_wire_s for h in handoffs]),
        **share_figures("handoff", handoffs),
    }


def share_figures(name: str, handoffs: Sequence[HandedOver]) -> Figures:
    """Of the bytes, what had not arrived with the first proposal; of the wire's time, what digests added to a hand-off."""
    late = [h.done.num_late_bytes / h.done.num_bytes for h in handoffs]
    digest = [h.done.digest_s / h.done.total_wire_s for h in handoffs]
    return {
        f"transfer.{name}.late_share_mean": statistics.fmean(late),
        f"transfer.{name}.late_share_max": max(late),
        f"transfer.{name}.digest_over_wire_p50": statistics.median(digest),
    }


def penalty_figures(cold: Sequence[HandedOver], warm: Sequence[HandedOver]) -> Figures:
    """How much later a request runs because its workers had never met."""
    usual_s = statistics.median(h.placed_s for h in warm)
    penalties = sorted(h.placed_s - usual_s for h in cold)
    return {
        "transfer.cold_pair.met_p50_s": usual_s,
        "transfer.cold_pair.penalty_p50_s": statistics.median(penalties),
        "transfer.cold_pair.penalty_max_s": penalties[-1],
    }


def _percentiles(name: str, seconds: Sequence[float]) -> Figures:
    percentiles = statistics.quantiles(seconds, n=100, method="inclusive")
    return {
        f"transfer.{name}.p50_s": percentiles[49],
        f"transfer.{name}.p99_s": percentiles[98],
    }


async def _run_all(pair: WorkerPair, prompts: Sequence[Sequence[int]]) -> list[HandedOver]:
    waiting = list(prompts)
    handoffs: list[HandedOver] = []

    async def client() -> None:
        while waiting:
            handoffs.append(await pair.run(waiting.pop(), num_tokens=GENERATED))

    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    return handoffs


async def _cold_pairs(
    model: str, prompts: Sequence[Sequence[int]], count: int
) -> tuple[list[HandedOver], list[HandedOver]]:
    """(the first hand-off to each decode worker, the second)."""
    settings = AllSettings.model_validate({"model": model, "decode": {"port": 0}})
    loaded = await asyncio.to_thread(build_engine, decode_config(settings).engine)
    waiting = list(prompts)
    cold: list[HandedOver] = []
    warm: list[HandedOver] = []
    async with workers(model, "prefill") as (prefill_address,):
        for _ in range(1 + count):
            async with (
                _decode_worker(settings, loaded) as decode_address,
                worker_pair(prefill_address, decode_address) as pair,
            ):
                for handoffs in (cold, warm):
                    handoffs.append(await pair.run(waiting.pop(), num_tokens=2))
    # The first pair pays for what a process does once.
    return cold[1:], warm[1:]


@contextlib.asynccontextmanager
async def _decode_worker(settings: AllSettings, loaded: LoadedEngine) -> AsyncIterator[str]:
    """The address of a new one in this process, which lends it the engine."""
    stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    config = replace(decode_config(settings), drain_s=0.0)
    serving = asyncio.create_task(
        serve_decode(config, loaded=loaded, ready=address.set_result, stop=stop)
    )
    try:
        await asyncio.wait((serving, address), timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
        yield address.result()
    finally:
        stop.set()
        await serving
