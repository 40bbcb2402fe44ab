"""Asks a router many things at once and keeps every round apart. Knows the SDK only."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import dspark
from common.types import SamplingParams, Verification

GREEDY = dspark.SamplingParams(temperature=0.0)
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    prompt: tuple[int, ...]
    sampling: dspark.SamplingParams = GREEDY
    stop: dspark.StopParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came, round by round."""

    events: tuple[dspark.GenerationEvent, ...]
    completion: dspark.Completion

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completion.token_ids

    @property
    def rounds(self) -> tuple[int, ...]:
        """Tokens of each round; the first one, without drafts, is the prompt's."""
        return tuple(len(event.token_ids) for event in self.events)


def ask_all(address: str, asks: Sequence[Ask], *, num_at_once: int = 16) -> list[Answer]:
    """Answers in the order of the questions; raises the first error."""
    with (
        dspark.Client(address, timeout=TIMEOUT_S) as client,
        ThreadPoolExecutor(num_at_once) as threads,
    ):
        return list(threads.map(lambda ask: _answer(client, ask), asks))


def exactly(num_tokens: int) -> dspark.StopParams:
    """So many tokens, whatever they are."""
    return dspark.StopParams(max_tokens=num_tokens, ignore_eos=True)


def engine_sampling(params: dspark.SamplingParams) -> SamplingParams:
    """The same request to an engine without a router; only for seeded or greedy ones."""
    return SamplingParams(
        temperature=1.0 if params.temperature is None else params.temperature,
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else params.top_p,
        seed=params.seed or 0,
        verification=Verification.COUPLED,
    )


def _answer(client: dspark.Client, ask: Ask) -> Answer:
    stream = client.generate(ask.prompt, sampling=ask.sampling, stop=ask.stop, stream=True)
    with stream:
        events = tuple(stream)
        return Answer(events=events, completion=stream.completion)
