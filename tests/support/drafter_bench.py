"""Drives the drafter without an engine: greedy drafts behind what a `TargetBench` has run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.sampling.params import SamplingRows
from common.spec_decode.draft_sampling import markov_draft
from common.types import SamplingParams
from tests.support.slow_drafter import SlowDrafts
from tests.support.target_bench import TargetBench


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the drafter gives for a batch, `[B, …]`."""

    hidden: torch.Tensor
    base_logits: torch.Tensor
    token_ids: list[list[int]]
    confidence_logits: torch.Tensor

    def require_equal(self, row: int, expected: SlowDrafts, *, tolerance: float) -> None:
        for found, wanted in (
            (self.hidden[row], expected.hidden),
            (self.base_logits[row], expected.base_logits),
            (self.confidence_logits[row], expected.confidence_logits),
        ):
            torch.testing.assert_close(found, wanted.float(), atol=tolerance, rtol=0)
        assert self.token_ids[row] == expected.token_ids


@torch.inference_mode()
def draft(
    bench: TargetBench,
    slots: Sequence[int],
    lengths: Sequence[int],
    anchors: Sequence[int],
    num_drafts: int,
    *,
    valid_from: Sequence[int] | None = None,
) -> Drafts:
    """Draft behind `anchors`, whose positions are `lengths`."""
    drafter = bench.model.drafter
    assert drafter is not None
    block = drafter.draft_block(
        torch.tensor(anchors),
        torch.tensor(lengths),
        torch.tensor(valid_from or [0] * len(slots)),
        torch.tensor(slots),
        bench.pool,
        num_drafts,
    )
    greedy = [SamplingParams(temperature=0.0)] * len(slots)
    result = markov_draft(
        base_logits=block.base_logits,
        anchor_ids=torch.tensor(anchors),
        markov_bias=drafter.markov,
        rows=SamplingRows.of(greedy, lengths, "cpu").repeat(num_drafts),
        coupled=torch.ones(len(slots), dtype=torch.bool),
        want_probs=False,
        top_k=[0] * len(slots),
        vocabulary=bench.model.vocabulary,
    )
    logits = drafter.confidence_logits(block.hidden, result.embeddings)
    return Drafts(block.hidden, block.base_logits, result.token_ids.tolist(), logits)
