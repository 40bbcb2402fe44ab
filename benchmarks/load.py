"""Drives a router with many clients at once and times every token. Knows the SDK; never sees a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import dspark
from benchmarks.prompts import Prompt

MAX_TOKENS = 96
GREEDY = dspark.SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answered request, in seconds of this process's clock."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    num_rounds: int
    """Verification rounds, without the first token's."""
    sent: float
    first: float
    """When the first token arrived."""
    last: float

    @property
    def time_to_first_token_s(self) -> float:
        return self.first - self.sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of a load gave."""

    samples: tuple[Sample, ...]

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first ones, over the time in which any request was past its first token."""
        return _later_tokens(self.samples) / _covered_s((s.first, s.last) for s in self.samples)

    @property
    def total_tokens_per_s(self) -> float:
        """All tokens over all time, waiting and prompts included."""
        num_tokens = sum(len(s.token_ids) for s in self.samples)
        begin, end = min(s.sent for s in self.samples), max(s.last for s in self.samples)
        return num_tokens / (end - begin)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per verification round, the target's own included."""
        return _later_tokens(self.samples) / sum(s.num_rounds for s in self.samples)

    def of_domain(self, domain: str) -> Run:
        return Run(samples=tuple(s for s in self.samples if s.prompt.domain == domain))


async def drive(
    address: str,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    sampling: dspark.SamplingParams = GREEDY,
    max_tokens: int = MAX_TOKENS,
) -> Run:
    """Answer all prompts once, `concurrency` at a time, each to its end or `max_tokens`."""
    waiting = list(reversed(prompts))
    samples: list[Sample] = []

    async def client_loop(client: dspark.AsyncClient) -> None:
        while waiting:
            prompt = waiting.pop()
            samples.append(await _timed(client, prompt, sampling, max_tokens))

    async with dspark.AsyncClient(address) as client:
        await asyncio.gather(*(client_loop(client) for _ in range(concurrency)))
    return Run(samples=tuple(samples))


async def _timed(
    client: dspark.AsyncClient, prompt: Prompt, sampling: dspark.SamplingParams, max_tokens: int
) -> Sample:
    sent = time.perf_counter()
    first = last = 0.0
    stop = dspark.StopParams(max_tokens=max_tokens)
    stream = client.generate(prompt.content, sampling=sampling, stop=stop, stream=True)
    async with stream:
        async for event in stream:
            if event.token_ids:
                last = time.perf_counter()
                first = first or last
    return Sample(
        prompt=prompt,
        token_ids=stream.token_ids,
        num_rounds=stream.completion.usage.rounds,
        sent=sent,
        first=first,
        last=last,
    )


def _later_tokens(samples: Iterable[Sample]) -> int:
    return sum(len(sample.token_ids) - 1 for sample in samples)


def _covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    covered, end = 0.0, float("-inf")
    for begin, until in sorted(intervals):
        covered += max(0.0, until - max(begin, end))
        end = max(end, until)
    return covered
