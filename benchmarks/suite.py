"""The main benchmark, in its order. Knows what is compared with what; measures by `load` and `peer`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import dspark
from benchmarks.deployments import deployed, worker_threads
from benchmarks.load import Run, drive
from benchmarks.peer import PeerDecoder
from benchmarks.prompts import Prompt, load_prompts
from common.tokenizer import ChatMessage, Tokenizer

Figures = dict[str, float]
Say = Callable[[str], None]

NUM_PEER_TOKENS = 48
NUM_PEER_PROMPTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long everything takes."""

    repeats: int = 3
    """Pairs of runs per concurrency; figures are medians."""
    every: int = 2
    """Of the unseen prompts, one in so many is measured at concurrency 1."""
    sampled: int = 2
    """Times that every unseen prompt is answered at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same load on both deployments, one right after the other: the machine's moods hit both."""

    target: Run
    dspark: Run


async def run_main(model: str, checkpoint_dir: Path, effort: Effort, say: Say) -> Figures:
    """Every figure of the main benchmark by name."""
    prompts = [prompt for prompt in load_prompts() if prompt.is_unseen]
    few = prompts[:: effort.every]
    async with (
        deployed(model, speculate=False) as target,
        deployed(model, speculate=True) as speculating,
    ):
        say("warming up")
        for address in (target, speculating):
            await drive(address, few[:4], concurrency=4, max_tokens=24)
        loads = {1: few, 4: prompts, 16: [*prompts, *prompts]}
        figures: Figures = {}
        for concurrency, load in loads.items():
            pairs = []
            for i in range(effort.repeats):
                say(
                    f"{concurrency} at once, {len(load)} requests, pair {i + 1} of {effort.repeats}"
                )
                pairs.append(await _pair(target, speculating, load, concurrency))
            figures |= _decode_figures(concurrency, pairs)
        say("accepted lengths")
        figures |= await _accepted_lengths(speculating, prompts, effort)
    say("transformers")
    figures |= _peer_figures(checkpoint_dir, few, figures)
    return figures


async def _pair(target: str, speculating: str, load: Sequence[Prompt], concurrency: int) -> Pair:
    pair = Pair(
        target=await drive(target, load, concurrency=concurrency),
        dspark=await drive(speculating, load, concurrency=concurrency),
    )
    tokens = [
        sorted((s.prompt.id, s.token_ids) for s in run.samples)
        for run in (pair.target, pair.dspark)
    ]
    assert tokens[0] == tokens[1], "speculation changed the output; the figures would mean nothing"
    return pair


def _decode_figures(concurrency: int, pairs: Sequence[Pair]) -> Figures:
    c = f"c{concurrency}"
    modes = {"target": [p.target for p in pairs], "dspark": [p.dspark for p in pairs]}
    figures = {f"decode.{c}.dspark_over_target": _median(_ratio(pair) for pair in pairs)}
    for domain in ("chat", "code"):
        figures[f"decode.{c}.{domain}.dspark_over_target"] = _median(
            _request_ratio(pair, domain) for pair in pairs
        )
    for mode, runs in modes.items():
        first_s = sorted(s.time_to_first_token_s for run in runs for s in run.samples)
        figures |= {
            f"decode.{c}.{mode}_tokens_per_s": _median(r.decode_tokens_per_s for r in runs),
            f"total.{c}.{mode}_tokens_per_s": _median(r.total_tokens_per_s for r in runs),
            f"ttft.{c}.{mode}.p50_s": statistics.median(first_s),
            f"ttft.{c}.{mode}.p95_s": first_s[int(0.95 * (len(first_s) - 1))],
        }
    figures[f"ttft.{c}.p50_s"] = figures[f"ttft.{c}.dspark.p50_s"]
    return figures


def _ratio(pair: Pair) -> float:
    return pair.dspark.decode_tokens_per_s / pair.target.decode_tokens_per_s


def _request_ratio(pair: Pair, domain: str) -> float:
    """How much quicker the requests of a domain got, each by itself: at once they share the time."""
    target, speculating = (
        sum(s.last - s.first for s in run.of_domain(domain).samples)
        for run in (pair.target, pair.dspark)
    )
    return target / speculating


async def _accepted_lengths(address: str, prompts: Sequence[Prompt], effort: Effort) -> Figures:
    """On prompts that training has not seen. Unseeded requests are verified by rejection, seeded ones coupled."""
    figures: Figures = {}
    greedy = await drive(address, prompts, concurrency=16)
    sampled = [
        await drive(
            address, prompts, concurrency=16, sampling=dspark.SamplingParams(temperature=1.0)
        )
        for _ in range(effort.sampled)
    ]
    coupled = [
        await drive(
            address,
            prompts,
            concurrency=16,
            sampling=dspark.SamplingParams(temperature=1.0, seed=seed),
        )
        for seed in range(effort.sampled)
    ]
    for domain in ("chat", "code"):
        for name, runs in (("greedy", [greedy]), ("t1", sampled), ("t1_coupled", coupled)):
            samples = tuple(s for run in runs for s in run.of_domain(domain).samples)
            figures[f"accepted_length.{domain}.{name}"] = Run(samples=samples).mean_accepted_length
    return figures


def _peer_figures(checkpoint_dir: Path, prompts: Sequence[Prompt], measured: Figures) -> Figures:
    tokenizer = Tokenizer.from_folder(checkpoint_dir)
    token_ids = [tokens_of(tokenizer, prompt) for prompt in prompts]
    step = max(1, len(token_ids) // NUM_PEER_PROMPTS)
    decoder = PeerDecoder(checkpoint_dir, num_threads=worker_threads())
    decoder.run(token_ids[:1], num_tokens=8)
    run = decoder.run(token_ids[::step], num_tokens=NUM_PEER_TOKENS)
    target = measured["decode.c1.target_tokens_per_s"]
    return {
        "decode.c1.transformers_tokens_per_s": run.tokens_per_s,
        "decode.c1.target_over_transformers": target / run.tokens_per_s,
    }


def tokens_of(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if isinstance(prompt.content, str):
        return tokenizer.encode(prompt.content, add_special_tokens=True)
    return tokenizer.encode_chat(
        [ChatMessage(role=message.role, content=message.content) for message in prompt.content]
    )


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)
