"""Every accepted length at every position around every border: speculation never changes what is generated.

A drafter accepts what it accepts; to force a length, the true continuation is known beforehand and a proposal is made
of its first k tokens, a wrong one and noise. Tokens alone would hide a small error of the cache, so the log-probability
of every token is compared as well.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from common.engine.request import Draft, Request, Role
from common.types import Proposal, RequestId
from tests.support.engine_bench import (
    GREEDY,
    LOGPROB_TOLERANCE,
    EngineBench,
    Generated,
    Wanted,
    random_tokens,
    small_model,
)

MODEL = small_model(drafter=False)
VOCAB = MODEL.config.vocab_size
STARTS = (1, 111, 239)
"""Walks begin here and cover the positions behind: every phase of a ratio-4 group, 127 … 129, 255 … 257."""
SPAN = 24
LONGEST = 15


@dataclass(frozen=True, slots=True)
class Truth:
    """A prompt with its greedy continuation, decoded without speculation."""

    start: int
    tokens: list[int]
    logprobs: list[float]
    """From position `start` on."""

    def check(self, generated: Generated) -> None:
        base = generated.rounds[0].base
        expected = self.tokens[base : base + len(generated.tokens)]
        assert generated.tokens == expected
        torch.testing.assert_close(
            torch.tensor(generated.logprobs),
            torch.tensor(self.logprobs[base - self.start :][: len(generated.tokens)]),
            atol=LOGPROB_TOLERANCE,
            rtol=0,
        )


@pytest.fixture(scope="module")
def truths() -> list[Truth]:
    bench = EngineBench(MODEL, draft_length=0)
    length = SPAN + 2 * LONGEST + 2
    prompts = [random_tokens(start, seed=start) for start in STARTS]
    outputs = bench.run(
        *(Wanted(prompt=prompt, max_length=len(prompt) + length) for prompt in prompts)
    )
    return [
        Truth(len(prompt), [*prompt, *output.tokens], output.logprobs)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


class Walk:
    """One request that accepts exactly `accepted` of `draft_length` drafts in every round."""

    def __init__(self, truth: Truth, request: Request, accepted: int, draft_length: int) -> None:
        self.truth, self.request = truth, request
        self.accepted, self._draft_length = accepted, draft_length
        self._rng = random.Random(request.request_id)

    def propose(self) -> None:
        length = len(self.request.tokens)
        ids = self.truth.tokens[length : length + self.accepted]
        if len(ids) < self._draft_length:
            ids.append((self.truth.tokens[length + self.accepted] + 1) % VOCAB)
        while len(ids) < self._draft_length:
            ids.append(self._rng.randrange(VOCAB))
        sure = (1.0,) * self._draft_length
        self.request.draft = Draft(proposal=Proposal(token_ids=tuple(ids), confidences=sure))

    @property
    def is_over(self) -> bool:
        return len(self.request.tokens) >= self.truth.start + self._draft_length + SPAN


def clone(bench: EngineBench, source: Request, name: str) -> Request:
    """The same state in another slot and other pages of the pool."""
    slot = bench.take_slot()
    for buffer in bench.pool.buffers.values():
        if buffer.region.window_rows:
            buffer.tensor[:, slot] = buffer.tensor[:, source.slot]
        else:
            pages = bench.block_table(slot)
            buffer.tensor[:, pages] = buffer.tensor[:, source.block_table]
    return bench.adopt(
        Request(
            request_id=RequestId(name),
            epoch=1,
            role=Role.GENERATE,
            tokens=list(source.tokens),
            num_computed=source.num_computed,
            max_length=source.max_length,
            sampling=GREEDY,
            slot=slot,
            block_table=[],
        )
    )


def start_walks(bench: EngineBench, truth: Truth, draft_length: int) -> list[Walk]:
    """Walks that together accept every length from every position: of step k + 1 there is one at each offset.

    None of them is scheduled yet.
    """
    source = bench.add(
        Wanted(prompt=tuple(truth.tokens[: truth.start]), max_length=len(truth.tokens))
    )
    bench.step()
    walks = []
    for offset in range(draft_length + 1):
        walks += [
            Walk(
                truth,
                clone(bench, source, f"{truth.start}+{offset} accepts {accepted}"),
                accepted,
                draft_length,
            )
            for accepted in range(offset, draft_length + 1)
        ]
        for walk in walks:
            bench.engine.remove(walk.request.request_id)
        bench.step()
    bench.remove(source)
    return walks


@pytest.mark.parametrize("draft_length", [1, 5, 7, 15])
def test_every_accepted_length_at_every_position_gives_plain_greedy_tokens(
    truths: list[Truth], draft_length: int
) -> None:
    num_walks = len(STARTS) * (draft_length + 1) * (draft_length + 2) // 2
    bench = EngineBench(
        MODEL,
        draft_length=draft_length,
        num_slots=num_walks + 1,
        max_length=384,
        max_step_rows=max(256, num_walks * (draft_length + 1)),
        garbage=True,
    )
    walks = [walk for truth in truths for walk in start_walks(bench, truth, draft_length)]
    assert len(walks) == num_walks
    for walk in walks:
        bench.engine.add(walk.request)
    met: set[tuple[int, int]] = set()
    while walks:
        for walk in walks:
            walk.propose()
            met.add((len(walk.request.tokens), walk.accepted))
        report = bench.step()
        assert len(report.rounds) == len(walks)
        for walk, result in zip(walks, report.rounds, strict=True):
            assert result.request is walk.request
            assert (result.num_draft, result.num_accepted) == (draft_length, walk.accepted)
        over = [walk for walk in walks if walk.is_over]
        for walk in over:
            walk.truth.check(bench.generated[walk.request.request_id])
            bench.remove(walk.request)
        walks = [walk for walk in walks if not walk.is_over]
    for border in (4, 8, 128, 256):
        for length in range(border - 1, border + 5):
            assert {k for at, k in met if at == length} == set(range(draft_length + 1))
