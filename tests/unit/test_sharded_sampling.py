"""Verification and drafting over parts of the vocabulary decide as they do over all of it, in every bit.

Logits and biases are looked up in tables here, so that no rank computes them in another order than a single one does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from common.engine.outputs import reported_logprobs
from common.engine.proposals import DraftTensors, Proposer
from common.engine.request import Draft, Request, Role
from common.engine.scheduler import ScheduledRequest
from common.engine.verification import Verified, verify_rows
from common.engine.verify_block import VerifyBlock
from common.kv_cache.pool import CachePool
from common.model.drafter import BlockOutput, Drafter
from common.parallel.collectives import Axis
from common.sampling.logprobs import TokenLogprobs
from common.spec_decode.verify import VerificationResult
from common.types import Proposal, RequestId, SamplingParams, Verification
from tests.support.thread_ranks import run_axis
from tests.support.vocabularies import vocabulary_of

CPU = torch.device("cpu")
DRAFTS = 5
HIDDEN, RANK = 6, 4
SIZES = (64, 61, 9)
"""One that divides by four, one that does not, and one that leaves the last of four ranks nothing."""

GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=0.9, seed=5)
REJECTION = SamplingParams(temperature=1.1, seed=6, verification=Verification.REJECTION)
TOP_K = SamplingParams(temperature=0.7, top_k=3, seed=7)
TOP_P = SamplingParams(temperature=1.3, top_p=0.6, seed=8)
TOP_K_P = SamplingParams(
    temperature=1.0, top_k=5, top_p=0.8, seed=9, verification=Verification.REJECTION
)
TOP_P_REJECTION = replace(TOP_P, verification=Verification.REJECTION)
BATCHES: dict[str, tuple[SamplingParams, ...]] = {
    "greedy": (GREEDY,) * 6,
    "coupled": (COUPLED,) * 6,
    "rejection": (REJECTION,) * 6,
    "top-k": (TOP_K,) * 6,
    "top-p": (TOP_P,) * 6,
    "top-k, top-p, rejection": (TOP_K_P,) * 6,
    "top-p, rejection": (TOP_P_REJECTION,) * 6,
    "temperatures and seeds": tuple(
        replace(COUPLED, temperature=t, seed=2**i)
        for i, t in enumerate((1.0, 0.3, 0.0, 2.7, 9.0, 0.0))
    ),
    "mixed": (GREEDY, COUPLED, REJECTION, TOP_K, TOP_P, TOP_K_P, GREEDY),
    "log-probabilities": tuple(
        replace(sampling, logprobs=count)
        for sampling, count in zip(
            (COUPLED, GREEDY, REJECTION, TOP_K, TOP_K_P, TOP_P, REJECTION),
            (0, 2, 1, 3, None, 5, None),
            strict=True,
        )
    ),
}


# Verification ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """Requests with drafts, some of which the target agrees with, and the target's logits."""

    step: list[ScheduledRequest]
    logits: torch.Tensor  # [T, V]

    def verify(self, axis: Axis) -> tuple[Verified, TokenLogprobs | None]:
        block = VerifyBlock(self.step, CPU)
        ours = vocabulary_of(self.logits.shape[-1], axis)
        verified = verify_rows(block, self.logits[:, ours.part], ours)
        return verified, reported_logprobs(block, verified)


def make_round(batch: Sequence[SamplingParams], size: int, seed: int) -> Round:
    """Even seeds bring equals: at the top of greedy rows, among what filters look at, and under any noise."""
    generator = torch.Generator().manual_seed(seed)
    num_draft = [(seed + i) % (DRAFTS + 1) for i in range(len(batch))]
    width = max(num_draft) + 1
    logits = 4 * torch.randn(len(batch), width, size, generator=generator)
    if seed % 2 == 0:
        logits = (logits / 2).round()
        # So large that all noise is rounded away from some rows, and equals stay equals.
        is_huge = torch.rand(len(batch), width, 1, generator=generator) < 0.2
        logits = torch.where(is_huge, logits * 1e12, logits)
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
    rows = [logits[i, : count + 1] for i, count in enumerate(num_draft)]
    return Round(step, torch.cat(rows))


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
def test_every_rank_accepts_and_reports_what_a_single_one_would(
    batch: str, size: int, ranks: int
) -> None:
    seen: set[int] = set()
    for seed in range(8):
        drawn = make_round(BATCHES[batch], size, seed)
        expected, expected_logprobs = drawn.verify(Axis("tp"))
        for found, logprobs in run_axis(ranks, drawn.verify):
            assert torch.equal(found.result.token_ids, expected.result.token_ids), f"{seed=}"
            assert torch.equal(found.result.num_accepted, expected.result.num_accepted), f"{seed=}"
            assert (logprobs is None) == (expected_logprobs is None)
            if logprobs is not None and expected_logprobs is not None:
                for ours, theirs in zip(logprobs, expected_logprobs, strict=True):
                    assert torch.equal(ours, theirs), f"{seed=}"
        seen |= set(expected.result.num_accepted.tolist())
    assert {0, 1, 2} <= seen, f"only {seen} drafts were ever accepted"


def test_logits_that_the_temperature_makes_equal_pass_top_k_by_their_ids() -> None:
    """The largest of the logits themselves is not the one that is kept: its neighbour below it has the lower id."""
    temperature = torch.tensor(1.3)
    low = next(x for x in torch.linspace(1, 2, 99) if x / temperature == above(x) / temperature)
    row = torch.full((1, 8), -5.0)
    row[0, 1], row[0, 2] = low, above(low)  # both on the first rank, which gives one candidate
    sampling = SamplingParams(temperature=float(temperature), top_k=1, seed=3)
    request = make_request(0, [1, 2], sampling)
    drawn = Round([ScheduledRequest(request=request, num_tokens=1, num_draft=0)], row)
    for found, _ in [drawn.verify(Axis("tp")), *run_axis(2, drawn.verify)]:
        assert found.result.token_ids.tolist() == [[1]]


def above(x: torch.Tensor) -> torch.Tensor:
    """The next float."""
    return torch.nextafter(x, torch.tensor(torch.inf))


def test_a_proposal_without_distributions_is_verified_by_winners() -> None:
    """The first round after a hand-off: coupled, whatever the request asks for, and nothing to compare."""
    drawn = make_round((REJECTION,) * 6, 64, 0)
    for scheduled in drawn.step:
        draft = scheduled.request.draft
        assert draft is not None
        scheduled.request.draft = replace(draft, probs=None)
    expected, _ = drawn.verify(Axis("tp"))
    for found, _ in run_axis(4, drawn.verify):
        assert torch.equal(found.result.token_ids, expected.result.token_ids)
    # Without drafts a rejection's own noise draws the token; it needs a winner too.
    assert bytes_of(4, drawn.verify) == 21 * PAIR * 3


PAIR, CANDIDATE, ROW = 16, 8, 64 // 4 * 4
"""Bytes that a rank gives to each of the others of four for a winner, for one that may pass a top-k, for its part of a row."""


def bytes_of(ranks: int, body: Callable[[Axis], object]) -> int:
    """What one rank gives to others in it."""

    def counted(axis: Axis) -> int:
        body(axis)
        assert set(axis.sent_bytes) == {"gather"}
        return axis.sent_bytes["gather"]

    (count,) = set(run_axis(ranks, counted))
    return count


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("greedy", 21 * PAIR),
        ("coupled", 21 * PAIR),
        ("temperatures and seeds", 21 * PAIR),
        # The rows of its drafts alone: behind them a winner is enough.
        ("rejection", 15 * ROW + 6 * PAIR),
        ("top-k", 21 * 3 * CANDIDATE),
        ("top-p", 21 * ROW),
        ("top-k, top-p, rejection", 21 * 5 * CANDIDATE),
        ("top-p, rejection", 21 * ROW),
    ],
)
def test_verification_gathers_no_more_than_each_of_21_rows_needs(batch: str, expected: int) -> None:
    """Six requests of which request i has i drafts: 15 of drafts, 21 in all, 36 if they were padded."""
    assert bytes_of(4, make_round(BATCHES[batch], 64, 0).verify) == expected * 3


@pytest.mark.parametrize("batch", ["greedy", "coupled", "rejection", "top-k", "top-p"])
def test_rows_whose_log_probabilities_are_reported_are_gathered_once(batch: str) -> None:
    reporting = [replace(sampling, logprobs=2) for sampling in BATCHES[batch]]
    assert bytes_of(4, make_round(reporting, 64, 0).verify) == 21 * ROW * 3
    # And nobody's beside them.
    one = [*BATCHES["greedy"][:4], replace(BATCHES[batch][4], logprobs=2), GREEDY]
    assert bytes_of(4, make_round(one, 64, 0).verify) == (5 * ROW + 16 * PAIR) * 3


def test_a_top_k_of_half_a_part_gathers_its_part() -> None:
    half = make_round((replace(TOP_K, top_k=8),) * 6, 64, 0)
    assert bytes_of(4, half.verify) == 21 * ROW * 3
    less = make_round((replace(TOP_K, top_k=7),) * 6, 64, 0)
    assert bytes_of(4, less.verify) == 21 * 7 * CANDIDATE * 3


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_row_of_a_mixed_batch_costs_what_it_needs(ranks: int) -> None:
    """Requests have 1 to 5, 0 and 1 drafts."""
    row = 64 // ranks * 4
    winners = 2 + 3 + 1 + 2  # greedy, coupled, behind the drafts of the rejection, greedy
    expected = winners * PAIR + (3 + 6) * row + 5 * 3 * CANDIDATE + 1 * 5 * CANDIDATE
    assert bytes_of(ranks, make_round(BATCHES["mixed"], 64, 1).verify) == expected * (ranks - 1)


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
    ours = vocabulary_of(size, axis)
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


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("greedy", 6 * PAIR),
        ("coupled", 6 * PAIR),
        ("temperatures and seeds", 6 * PAIR),
        ("rejection", 6 * ROW),
        ("top-k", 6 * 3 * CANDIDATE),
        ("top-p", 6 * ROW),
        ("top-k, top-p, rejection", 6 * 5 * CANDIDATE),
        ("mixed", 3 * PAIR + 2 * ROW + (3 + 5) * CANDIDATE),
    ],
)
def test_drafts_gather_no_more_than_each_of_them_needs(batch: str, expected: int) -> None:
    """Base logits and bias come as one sum, and what is drawn from it needs no more than the target's draw."""
    sent = bytes_of(4, lambda axis: propose(BATCHES[batch], 64, axis))
    assert sent == expected * DRAFTS * 3
