"""A target and a drafter over a handful of tokens, small enough to know every probability.

Both predict a token from the one before it, so the exact distribution of any continuation is a product of table rows.
Many requests, one seed each, run side by side as rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.parallel.collectives import Axis
from common.sampling.params import SamplingRows
from common.sampling.sampler import probabilities
from common.spec_decode.draft_sampling import DraftResult, markov_draft
from common.spec_decode.verify import NO_TOKEN, verify
from common.types import SamplingParams
from tests.support.vocabularies import vocabulary_of

VOCAB_SIZE = 4
ANCHOR = 1
_PROMPT_LENGTH = 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round:
    """What a schedule sees before it chooses widths."""

    index: int
    lengths: Tensor  # [R]: tokens generated so far
    proposal: DraftResult  # of this round
    previous: DraftResult | None  # the proposal of the round before
    previous_lengths: Tensor  # [R]


Schedule = Callable[[Round], Tensor]
"""Number of drafts to verify [R]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ToyChain:
    num_draft: int
    target_logits: Tensor  # [V, V] by previous token
    draft_logits: Tensor  # [V, V] by previous token

    @classmethod
    def make(cls, num_draft: int, seed: int = 0, likeness: float = 0.5) -> ToyChain:
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator) * 1.2
        other = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator) * 1.2
        return cls(
            num_draft=num_draft,
            target_logits=target,
            draft_logits=likeness * target + (1 - likeness) * other,
        )

    def exact(self, params: SamplingParams, num_tokens: int) -> Tensor:
        """Probability [V ** num_tokens] of each continuation of the anchor."""
        step = self.transition(self.target_logits, params)
        joint = step[ANCHOR]
        for _ in range(num_tokens - 1):
            joint = (joint[:, None] * step.repeat(len(joint) // VOCAB_SIZE, 1)).flatten()
        return joint

    @staticmethod
    def transition(logits: Tensor, params: SamplingParams) -> Tensor:
        """Probabilities [V, V] of the next token by the previous one."""
        return probabilities(
            logits, SamplingRows.of([params] * VOCAB_SIZE, range(VOCAB_SIZE), "cpu")
        )

    def generate(
        self,
        rows: SamplingRows,
        num_tokens: int,
        coupled: Callable[[int], Tensor],
        schedule: Schedule | None = None,
    ) -> Tensor:
        """Tokens [R, num_tokens] after the anchor, by rounds of draft and verify; `coupled` [R] is asked per round."""
        num_requests = len(rows)
        tokens = torch.full((num_requests, num_tokens + self.num_draft + 2), NO_TOKEN)
        tokens[:, 0] = ANCHOR
        request = torch.arange(num_requests)
        lengths = torch.ones(num_requests, dtype=torch.int64)
        previous, previous_lengths = None, lengths
        for index in range(num_tokens):
            is_coupled = coupled(index)
            proposal = self.propose(rows, tokens[request, lengths - 1], lengths, is_coupled)
            view = Round(
                index=index,
                lengths=lengths,
                proposal=proposal,
                previous=previous,
                previous_lengths=previous_lengths,
            )
            width = torch.full_like(lengths, self.num_draft) if schedule is None else schedule(view)
            result = verify(
                logits=self.verify_logits(tokens[request, lengths - 1], proposal.token_ids),
                draft_ids=proposal.token_ids,
                num_draft=width,
                rows=self.rows_at(rows, lengths, self.num_draft + 1),
                rejection=~is_coupled,
                draft_probs=proposal.probs,
            )
            previous, previous_lengths = proposal, lengths
            # A finished request goes on in place, so that all stay in step; its first tokens are settled.
            columns = lengths[:, None] + torch.arange(self.num_draft + 1)
            tokens.scatter_(1, columns, result.token_ids)
            lengths = (lengths + result.num_accepted + 1).clamp(max=num_tokens + 1)
        return tokens[:, 1 : num_tokens + 1]

    def propose(
        self, rows: SamplingRows, anchors: Tensor, lengths: Tensor, coupled: Tensor
    ) -> DraftResult:
        return markov_draft(
            base_logits=torch.zeros(len(rows), self.num_draft, VOCAB_SIZE),
            anchor_ids=anchors,
            markov_bias=lambda ids: (self.draft_logits[ids], ids[:, None].float()),
            rows=self.rows_at(rows, lengths, self.num_draft),
            coupled=coupled,
            want_probs=True,
            top_k=rows.top_k.tolist(),
            vocabulary=vocabulary_of(VOCAB_SIZE, Axis("tp")),
        )

    def verify_logits(self, anchors: Tensor, draft_ids: Tensor) -> Tensor:
        return self.target_logits[torch.cat([anchors[:, None], draft_ids], 1)]

    @staticmethod
    def rows_at(rows: SamplingRows, lengths: Tensor, count: int) -> SamplingRows:
        """Rows of `count` positions a request, from its next token on."""
        positions = _PROMPT_LENGTH + lengths[:, None] + torch.arange(count)
        return rows.repeat(count).at(positions.flatten())


def seeded_rows(params: SamplingParams, count: int, first_seed: int = 0) -> SamplingRows:
    """One request a seed."""
    one = SamplingRows.of([params], [0], "cpu")
    every = one.repeat(count)
    every.seed.copy_(torch.arange(first_seed, first_seed + count))
    return every


def continuation_counts(tokens: Tensor) -> Tensor:
    """How often each continuation [V ** K] occurs among tokens [R, K]."""
    powers = VOCAB_SIZE ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return (tokens * powers).sum(1).bincount(minlength=VOCAB_SIZE ** tokens.shape[1])
