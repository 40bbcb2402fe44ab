"""How long requests wait for hand-offs through the three services. Knows the SDK; what a wait is made of, others measure."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import dspark
from benchmarks.deployments import deployed
from benchmarks.prompts import load_prompts
from benchmarks.suite import tokens_of
from common.tokenizer import Tokenizer

NUM_TOKENS = 512
CONCURRENCY = 4
NUM_REQUESTS = 64
TIMEOUT_S = 60.0
STOP = dspark.StopParams(max_tokens=32, ignore_eos=True)
"""A request that ends within its first round may be over before the router has heard of its hand-off."""


async def run_handoffs(
    model: str, checkpoint_dir: Path, say: Callable[[str], None]
) -> dict[str, str | float]:
    """Figures by name."""
    prompts = token_prompts(checkpoint_dir, NUM_TOKENS, CONCURRENCY + NUM_REQUESTS)
    async with (
        deployed(model, speculate=True) as address,
        dspark.AsyncClient(address) as client,
    ):
        say("hand-offs: warming up")
        await _ask(client, prompts[:CONCURRENCY])
        say(f"hand-offs: {NUM_REQUESTS} prompts of {NUM_TOKENS} tokens, {CONCURRENCY} at once")
        completions = await _ask(client, prompts[CONCURRENCY:])
    engines = {c.route.transfer_engine for c in completions} - {""}
    return {
        "transfer.handoff.engine": "+".join(sorted(engines)),
        **request_figures([c.timings.handoff_s for c in completions]),
    }


def request_figures(handoffs_s: Sequence[float]) -> dict[str, float]:
    """What the router waits from a first token until the decode worker has the request; 0 when it had it before."""
    percentiles = statistics.quantiles(handoffs_s, n=100, method="inclusive")
    return {"transfer.handoff.p50_s": percentiles[49], "transfer.handoff.p99_s": percentiles[98]}


def token_prompts(checkpoint_dir: Path, num_tokens: int, count: int) -> list[list[int]]:
    """Prompts of equal length, none like another."""
    tokenizer = Tokenizer.from_folder(checkpoint_dir)
    text = [token for prompt in load_prompts() for token in tokens_of(tokenizer, prompt)]
    endless = itertools.cycle(text)
    return [
        list(itertools.islice(endless, num_tokens + index % 7))[:num_tokens]
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
