"""Verification and drafting over parts of the vocabulary decide as they do over all of it, in every bit.

Logits and biases are looked up in tables here, so that no rank computes them in another order than a single one does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from common.engine.proposals import DraftTensors, Proposer
from common.engine.request import Draft, Request, Role
from common.engine.scheduler import ScheduledRequest
from common.engine.verify_block import VerifyBlock
from common.kv_cache.pool import CachePool
from common.model.drafter import BlockOutput, Drafter
from common.parallel.collectives import Axis
from common.parallel.mesh import MeshShape
from common.parallel.shard import Shard
from common.parallel.vocabulary import Vocabulary
from common.spec_decode.verify import VerificationResult
from common.types import Proposal, RequestId, SamplingParams, Verification
from tests.support.thread_ranks import run_axis

CPU = torch.device("cpu")
DRAFTS = 5
HIDDEN, RANK = 6, 4
SIZES = (64, 61, 9)
"""One that divides by four, one that does not, and one that leaves the last of four ranks nothing."""

GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=0.9, seed=5)
REJECTION = SamplingParams(temperature=1.1, seed=6, verification=Verification.REJECTION)
FILTERED = (
    SamplingParams(temperature=0.7, top_k=3, seed=7),
    SamplingParams(temperature=1.3, top_p=0.6, seed=8),
    SamplingParams(
        temperature=1.0, top_k=5, top_p=0.8, seed=9, verification=Verification.REJECTION
    ),
)
BATCHES: dict[str, tuple[SamplingParams, ...]] = {
    "greedy": (GREEDY,) * 6,
    "coupled": (COUPLED,) * 6,
    "rejection": (REJECTION,) * 6,
    "top-k and top-p": FILTERED * 2,
    "mixed": (GREEDY, COUPLED, REJECTION, *FILTERED, GREEDY),
}


def vocabulary(size: int, axis: Axis) -> Vocabulary:
    shard = Shard(mesh=MeshShape(tp=axis.size), rank=axis.index)
    return Vocabulary(size=size, part=shard.vocabulary_part(size), axis=axis)


# Verification ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """Requests with drafts, some of which the target agrees with, and the target's logits."""

    step: list[ScheduledRequest]
    logits: torch.Tensor  # [R, width, V]

    def verify(self, axis: Axis) -> VerificationResult:
        block = VerifyBlock(self.step, CPU)
        ours = vocabulary(self.logits.shape[-1], axis)
        return block.verify(self.logits[..., ours.part], ours)


def make_round(batch: Sequence[SamplingParams], size: int, seed: int) -> Round:
    generator = torch.Generator().manual_seed(seed)
    num_draft = [(seed + i) % (DRAFTS + 1) for i in range(len(batch))]
    width = max(num_draft) + 1
    logits = 4 * torch.randn(len(batch), width, size, generator=generator)
    # Equal logits at the top, on different ranks: the lowest id must win.
    best = logits.amax(-1, keepdim=True)
    is_greedy = torch.tensor([sampling.is_greedy for sampling in batch])[:, None, None]
    is_equal = is_greedy & (torch.rand(logits.shape, generator=generator) < 0.1)
    logits = torch.where(is_equal, best, logits)
    step = []
    for i, sampling in enumerate(batch):
        # The drafts that a model close to the target would make.
        near = logits[i] + 0.3 * torch.randn(width, size, generator=generator)
        probs = near.softmax(-1)
        has_probs = sampling.verification is Verification.REJECTION
        ids = probs.multinomial(1, generator=generator) if has_probs else probs.argmax(-1)
        proposal = Proposal(token_ids=tuple(ids.flatten().tolist()), confidences=(0.5,) * width)
        draft = Draft(proposal=proposal, probs=probs if has_probs else None)
        tokens = [1] * (3 + i)
        step.append(
            ScheduledRequest(
                request=make_request(i, tokens, sampling, draft=draft),
                num_tokens=1,
                num_draft=num_draft[i],
            )
        )
    return Round(step, logits)


def make_request(
    index: int, tokens: list[int], sampling: SamplingParams, draft: Draft | None = None
) -> Request:
    return Request(
        request_id=RequestId(f"r{index}"),
        epoch=1,
        role=Role.GENERATE,
        tokens=tokens,
        num_computed=len(tokens) - 1,
        max_length=200,
        sampling=sampling,
        slot=index,
        block_table=[],
        draft=draft,
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_rank_accepts_what_a_single_one_would(batch: str, size: int, ranks: int) -> None:
    seen: set[int] = set()
    for seed in range(8):
        drawn = make_round(BATCHES[batch], size, seed)
        expected = drawn.verify(Axis("tp"))
        for found in run_axis(ranks, drawn.verify):
            assert torch.equal(found.token_ids, expected.token_ids), f"{seed=}"
            assert torch.equal(found.num_accepted, expected.num_accepted), f"{seed=}"
        seen |= set(expected.num_accepted.tolist())
    assert {0, 1, 2} <= seen, f"only {seen} drafts were ever accepted"


def bytes_of(ranks: int, body: Callable[[Axis], object]) -> int:
    """What one rank gives to others in it."""

    def counted(axis: Axis) -> int:
        body(axis)
        assert set(axis.sent_bytes) == {"gather"}
        return axis.sent_bytes["gather"]

    (count,) = set(run_axis(ranks, counted))
    return count


@pytest.mark.parametrize("ranks", [2, 4])
def test_greedy_requests_never_gather_rows_and_others_only_theirs(ranks: int) -> None:
    size = 64
    pair, row = 2 * 8, size // ranks * 4
    greedy = make_round(BATCHES["greedy"], size, 1)
    width = greedy.logits.shape[1]
    assert bytes_of(ranks, greedy.verify) == 6 * width * pair * (ranks - 1)
    mixed = make_round(BATCHES["mixed"], size, 1)
    width = mixed.logits.shape[1]
    assert bytes_of(ranks, mixed.verify) == (2 * pair + 5 * row) * width * (ranks - 1)


# Drafting --------------------------------------------------------------------------------------------------------


class TableDrafter:
    """Base logits, Markov biases and embeddings from tables, this rank's part of them."""

    def __init__(self, size: int, num_requests: int, part: slice) -> None:
        generator = torch.Generator().manual_seed(size)

        def table(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self._hidden = table(num_requests, DRAFTS, HIDDEN)
        # Few different values: equals at the top are common, on one rank and across ranks.
        self._base = (table(num_requests, DRAFTS, size)).round()[..., part]
        self._bias = (table(size, size)).round()[:, part]
        self._embedding = table(size, RANK)
        self._confidence = table(HIDDEN + RANK)

    def draft_block(self, *args: Any) -> BlockOutput:
        return BlockOutput(self._hidden, self._base)

    def markov(self, previous_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._bias[previous_ids], self._embedding[previous_ids]

    def confidence_logits(self, hidden: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        return (torch.cat((hidden, embeddings), -1) * self._confidence).sum(-1)


def propose(batch: Sequence[SamplingParams], size: int, axis: Axis) -> DraftTensors:
    """Proposals behind a round in which request i had i of its drafts accepted."""
    ours = vocabulary(size, axis)
    proposer = Proposer(
        cast(Drafter, TableDrafter(size, len(batch), ours.part)),
        cast(CachePool, None),
        ours,
        draft_length=DRAFTS,
        confidence_temperatures=torch.full((DRAFTS,), 1.3),
        device=CPU,
    )
    requests = [make_request(i, [1] * (3 + 2 * i), each) for i, each in enumerate(batch)]
    num_accepted = torch.arange(len(batch)) % (DRAFTS + 1)
    token_ids = torch.arange(len(batch) * (DRAFTS + 1)).view(len(batch), -1) % size
    verified = VerificationResult(token_ids=token_ids, num_accepted=num_accepted)
    return proposer.propose(list(range(len(batch))), requests, verified, (DRAFTS * len(batch),))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_rank_drafts_what_a_single_one_would(batch: str, size: int, ranks: int) -> None:
    expected = propose(BATCHES[batch], size, Axis("tp"))
    for found in run_axis(ranks, lambda axis: propose(BATCHES[batch], size, axis)):
        assert torch.equal(found.result.token_ids, expected.result.token_ids)
        assert torch.equal(found.result.embeddings, expected.result.embeddings)
        assert torch.equal(found.confidences, expected.confidences)
        assert found.members == expected.members
        assert found.by_rejection == expected.by_rejection
        # What drafts were drawn from matters to those alone that will be verified by rejection.
        assert (found.result.probs is None) == (expected.result.probs is None)
        if found.result.probs is not None and expected.result.probs is not None:
            chosen = [i for i, by_rejection in enumerate(found.by_rejection) if by_rejection]
            assert torch.equal(found.result.probs[chosen], expected.result.probs[chosen])


@pytest.mark.parametrize("ranks", [2, 4])
def test_greedy_drafts_never_gather_rows_and_others_only_theirs(ranks: int) -> None:
    size = 64
    pair, row = 2 * 8, size // ranks * 4

    def sent(batch: str) -> int:
        return bytes_of(ranks, lambda axis: propose(BATCHES[batch], size, axis))

    assert sent("greedy") == 6 * DRAFTS * pair * (ranks - 1)
    # Base logits and the bias of every draft, of the five sampled ones.
    assert sent("mixed") == (2 * pair + 5 * 2 * row) * DRAFTS * (ranks - 1)
