"""The main benchmark, in its order. Knows what is compared with what; measures by `load` and `peer`."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import dspark
from benchmarks.deployments import deployed, worker_threads
from benchmarks.load import Run, drive
from benchmarks.peer import PeerDecoder
from benchmarks.prompts import Prompt, load_prompts
from common.tokenizer import ChatMessage, Tokenizer

Figures = dict[str, float]
Say = Callable[[str], None]

NUM_PEER_TOKENS = 32
NUM_PEER_PROMPTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long everything takes."""

    turns_alone: int = 5
    """Turns at concurrency 1; figures are medians."""
    turns_together: int = 3
    """Turns at higher concurrency."""
    every: int = 2
    """Of the unseen prompts, one in so many is measured at concurrency 1."""
    sampled: int = 2
    """Times that every unseen prompt is answered at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The same load on both deployments, one right after the other: the machine's moods hit both."""

    target: Run
    dspark: Run
    peer_tokens_per_s: float = 0.0
    """transformers' rate in the same turn; 0 where it was not asked."""


async def run_main(model: str, checkpoint_dir: Path, effort: Effort, say: Say) -> Figures:
    """Every figure of the main benchmark by name."""
    prompts = [prompt for prompt in load_prompts() if prompt.is_unseen]
    few = prompts[:: effort.every]
    figures: Figures = {}
    async with (
        deployed(model, speculate=False) as target,
        deployed(model, speculate=True) as speculating,
    ):
        say("warming up")
        peer = _Peer(checkpoint_dir, few)
        for address in (target, speculating):
            await drive(address, few[:4], concurrency=4, max_tokens=24)
        for concurrency, load in {1: few, 4: prompts, 16: [*prompts, *prompts]}.items():
            turns: list[Turn] = []
            num_turns = effort.turns_alone if concurrency == 1 else effort.turns_together
            while len(turns) < num_turns:
                say(
                    f"{concurrency} at once, {len(load)} requests, turn {len(turns) + 1}/{num_turns}"
                )
                is_target_first = len(turns) % 2 == 0
                turn = await _turn(target, speculating, load, concurrency, is_target_first)
                if concurrency == 1:
                    turn = replace(turn, peer_tokens_per_s=await asyncio.to_thread(peer.rate))
                turns.append(turn)
            figures |= _decode_figures(concurrency, turns)
        say("accepted lengths")
        figures |= await _accepted_lengths(speculating, prompts, effort)
    return figures


class _Peer:
    """transformers on a few of the prompts, with as many threads as a worker has."""

    def __init__(self, checkpoint_dir: Path, prompts: Sequence[Prompt]) -> None:
        tokenizer = Tokenizer.from_folder(checkpoint_dir)
        step = max(1, len(prompts) // NUM_PEER_PROMPTS)
        self._prompts = [tokens_of(tokenizer, prompt) for prompt in prompts[::step]]
        self._decoder = PeerDecoder(checkpoint_dir, num_threads=worker_threads())
        self._decoder.run(self._prompts[:1], num_tokens=8)

    def rate(self) -> float:
        return self._decoder.run(self._prompts, num_tokens=NUM_PEER_TOKENS).tokens_per_s


async def _turn(
    target: str,
    speculating: str,
    load: Sequence[Prompt],
    concurrency: int,
    is_target_first: bool,
) -> Turn:
    """One run after the other, in this order or the other way round, so that a drift of the machine evens out."""
    order = (target, speculating) if is_target_first else (speculating, target)
    runs = {address: await drive(address, load, concurrency=concurrency) for address in order}
    return Turn(target=runs[target], dspark=runs[speculating])


def _decode_figures(concurrency: int, turns: Sequence[Turn]) -> Figures:
    c = f"c{concurrency}"
    modes = {"target": [t.target for t in turns], "dspark": [t.dspark for t in turns]}
    figures = {f"decode.{c}.dspark_over_target": _median(_ratio(turn) for turn in turns)}
    for domain in ("chat", "code"):
        figures[f"decode.{c}.{domain}.dspark_over_target"] = _median(
            _request_ratio(turn, domain) for turn in turns
        )
    figures[f"decode.{c}.equal_outputs"] = _median(_equal_outputs(turn) for turn in turns)
    peer_rates = [turn.peer_tokens_per_s for turn in turns]
    if all(peer_rates):
        figures[f"decode.{c}.transformers_tokens_per_s"] = _median(peer_rates)
        figures[f"decode.{c}.target_over_transformers"] = _median(
            turn.target.decode_tokens_per_s / turn.peer_tokens_per_s for turn in turns
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


def _ratio(turn: Turn) -> float:
    return turn.dspark.decode_tokens_per_s / turn.target.decode_tokens_per_s


def _request_ratio(turn: Turn, domain: str) -> float:
    """How much quicker the requests of a domain got, each by itself: at once they share the time."""
    target, speculating = (
        sum(s.last - s.first for s in run.of_domain(domain).samples)
        for run in (turn.target, turn.dspark)
    )
    return target / speculating


def _equal_outputs(turn: Turn) -> float:
    """Share of requests with the same tokens from both: all, unless two candidates are equal to the last bit."""
    target, speculating = (
        sorted((s.prompt.id, s.token_ids) for s in run.samples)
        for run in (turn.target, turn.dspark)
    )
    return sum(a == b for a, b in zip(target, speculating, strict=True)) / len(target)


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


def tokens_of(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if isinstance(prompt.content, str):
        return tokenizer.encode(prompt.content, add_special_tokens=True)
    return tokenizer.encode_chat(
        [ChatMessage(role=message.role, content=message.content) for message in prompt.content]
    )


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)
