"""Generated text has exactly the target's distribution, whatever drafts, rules and widths a round has.

Each chi-square comparison alarms falsely with probability 1e-6 over the choice of seeds, which are fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from common.sampling.noise import Purpose
from common.sampling.params import SamplingRows
from common.sampling.sampler import row_noise, sample
from common.spec_decode import draft_sampling
from common.spec_decode import verify as verify_module
from common.types import SamplingParams
from tests.unit.chi_square import FALSE_ALARM, p_value
from tests.unit.toy_chain import (
    ANCHOR,
    VOCAB_SIZE,
    Round,
    ToyChain,
    continuation_counts,
    seeded_rows,
)

NUM_REQUESTS = 30_000
NUM_TOKENS = 4

Coupled = Callable[[int], Tensor]

PLAIN = SamplingParams()
FILTERED = SamplingParams(temperature=0.8, top_k=3, top_p=0.9)


def _always_coupled(index: int) -> Tensor:
    return torch.ones(NUM_REQUESTS, dtype=torch.bool)


def _never_coupled(index: int) -> Tensor:
    return torch.zeros(NUM_REQUESTS, dtype=torch.bool)


def _coupled_first(index: int) -> Tensor:
    """As after a hand-off."""
    return torch.full((NUM_REQUESTS,), index == 0)


def _coupled_at_random(index: int) -> Tensor:
    return torch.rand(NUM_REQUESTS, generator=torch.Generator().manual_seed(index)) < 0.5


def _fit(chain: ToyChain, params: SamplingParams, tokens: Tensor) -> float:
    exact = chain.exact(params, NUM_TOKENS)
    return p_value(continuation_counts(tokens), exact)


@pytest.mark.parametrize("params", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize(
    "coupled", [_always_coupled, _never_coupled, _coupled_first, _coupled_at_random]
)
@pytest.mark.parametrize("num_draft", [1, 3])
def test_text_follows_the_target(params: SamplingParams, coupled: Coupled, num_draft: int) -> None:
    chain = ToyChain.make(num_draft)
    tokens = chain.generate(seeded_rows(params, NUM_REQUESTS), NUM_TOKENS, coupled)
    assert _fit(chain, params, tokens) > FALSE_ALARM


def test_text_follows_the_target_where_the_drafter_misses_its_tokens() -> None:
    """A drafter that never proposes what the target likes: nearly every token is a residual draw."""
    chain = ToyChain.make(2)
    chain = ToyChain(
        num_draft=2, target_logits=chain.target_logits, draft_logits=-3.0 * chain.target_logits
    )
    tokens = chain.generate(seeded_rows(PLAIN, NUM_REQUESTS), NUM_TOKENS, _never_coupled)
    assert _fit(chain, PLAIN, tokens) > FALSE_ALARM


def test_text_follows_the_target_where_widths_follow_the_drafts() -> None:
    """As a confidence does: a draft is admitted by the drafts before it."""

    def admit_after_even(view: Round) -> Tensor:
        goes_on = view.proposal.token_ids[:, :-1] % 2 == 0
        return 1 + goes_on.cumprod(1).sum(1)

    chain = ToyChain.make(3)
    rows = seeded_rows(PLAIN, NUM_REQUESTS)
    tokens = chain.generate(rows, NUM_TOKENS, _coupled_first, admit_after_even)
    assert _fit(chain, PLAIN, tokens) > FALSE_ALARM


def _cut_by_an_older_draft(view: Round) -> Tensor:
    """The most harmful lagged budget: verify nothing if the last proposal had token 0 where this one begins."""
    num_draft = view.proposal.token_ids.shape[1]
    if view.previous is None:
        return torch.full_like(view.lengths, num_draft)
    column = view.lengths - view.previous_lengths
    older = view.previous.token_ids.gather(1, column.clamp(max=num_draft - 1)[:, None])[:, 0]
    return torch.where((column < num_draft) & (older == 0), 0, num_draft)


@pytest.mark.parametrize("coupled", [_never_coupled, _coupled_first])
def test_text_follows_the_target_where_widths_follow_older_drafts(coupled: Coupled) -> None:
    chain = ToyChain.make(3, likeness=0.2)
    rows = seeded_rows(PLAIN, NUM_REQUESTS)
    tokens = chain.generate(rows, NUM_TOKENS, coupled, _cut_by_an_older_draft)
    assert _fit(chain, PLAIN, tokens) > FALSE_ALARM


def test_the_comparison_notices_drafts_that_share_the_noise_of_older_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards the depth in the key: without it the test above would have to fail, and does."""

    def without_depth(
        rows: SamplingRows, purpose: Tensor, vocab_size: int, depth: Tensor
    ) -> Tensor | None:
        return row_noise(rows, purpose, vocab_size)

    monkeypatch.setattr(draft_sampling, "row_noise", without_depth)
    chain = ToyChain.make(3, likeness=0.2)
    rows = seeded_rows(PLAIN, NUM_REQUESTS)
    tokens = chain.generate(rows, NUM_TOKENS, _never_coupled, _cut_by_an_older_draft)
    assert _fit(chain, PLAIN, tokens) < FALSE_ALARM


def test_the_comparison_notices_a_bonus_with_the_noise_of_coupled_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards RESIDUAL noise for the bonus: the proposal of the coupled first round has shown TARGET noise ahead."""
    only_target = SimpleNamespace(
        TARGET=Purpose.TARGET, RESIDUAL=Purpose.TARGET, ACCEPT=Purpose.ACCEPT
    )
    monkeypatch.setattr(verify_module, "Purpose", only_target)
    chain = ToyChain.make(3, likeness=0.2)
    rows = seeded_rows(PLAIN, NUM_REQUESTS)
    tokens = chain.generate(rows, NUM_TOKENS, _coupled_first, _cut_by_an_older_draft)
    assert _fit(chain, PLAIN, tokens) < FALSE_ALARM


def test_the_comparison_notices_a_missing_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused drafts replaced by draws from p: a common bug, which greedy tests cannot see."""
    monkeypatch.setattr(verify_module, "_MIN_RESIDUAL_MASS", 2.0)
    chain = ToyChain.make(1)
    tokens = chain.generate(seeded_rows(PLAIN, NUM_REQUESTS), NUM_TOKENS, _never_coupled)
    assert _fit(chain, PLAIN, tokens) < FALSE_ALARM


@pytest.mark.parametrize("likeness", [0.0, 0.5, 1.0])
def test_first_drafts_are_accepted_as_often_as_theory_says(likeness: float) -> None:
    """Rejection: 1 - TV(p, q), within six standard deviations (2e-9). Coupled: at least (1 - TV) / (1 + TV)."""
    chain = ToyChain.make(1, likeness=likeness)
    rows = seeded_rows(PLAIN, NUM_REQUESTS)
    p = chain.transition(chain.target_logits, PLAIN)[ANCHOR]
    q = chain.transition(chain.draft_logits, PLAIN)[ANCHOR]
    distance = 0.5 * float((p - q).abs().sum())
    margin = 6 * 0.5 / NUM_REQUESTS**0.5

    lengths = torch.ones(NUM_REQUESTS, dtype=torch.int64)
    anchors = torch.full((NUM_REQUESTS,), ANCHOR)
    rates = {}
    for is_coupled in (False, True):
        coupled = torch.full((NUM_REQUESTS,), is_coupled)
        proposal = chain.propose(rows, anchors, lengths, coupled)
        result = verify_module.verify(
            logits=chain.verify_logits(anchors, proposal.token_ids),
            draft_ids=proposal.token_ids,
            num_draft=torch.ones_like(lengths),
            rows=chain.rows_at(rows, lengths, 2),
            rejection=~coupled,
            draft_probs=proposal.probs,
        )
        rates[is_coupled] = float(result.num_accepted.double().mean())
    assert rates[False] == pytest.approx(1.0 - distance, abs=margin)
    assert rates[True] >= (1.0 - distance) / (1.0 + distance) - margin
    if likeness == 1.0:
        assert rates == {False: 1.0, True: 1.0}


def test_coupled_text_is_plain_sampling_of_the_same_seeds() -> None:
    chain = ToyChain.make(3)
    rows = seeded_rows(FILTERED, NUM_REQUESTS)
    tokens = chain.generate(rows, NUM_TOKENS, _always_coupled, _cut_by_an_older_draft)
    previous = torch.full((NUM_REQUESTS,), ANCHOR)
    for k in range(NUM_TOKENS):
        lengths = torch.full((NUM_REQUESTS,), k + 1)
        previous = sample(chain.target_logits[previous], chain.rows_at(rows, lengths, 1))
        assert torch.equal(tokens[:, k], previous)


def test_every_token_of_the_toy_is_possible_without_filters() -> None:
    """Else the comparisons above would have cells that say nothing."""
    assert float(ToyChain.make(1).exact(PLAIN, 2).min()) > 1e-4
    assert VOCAB_SIZE**NUM_TOKENS == 256
