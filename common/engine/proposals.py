"""The next proposals of a step's requests: one block through the drafter's stages, then the Markov draw. Knows requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine.request import Request, Role
from common.engine.tensors import ints
from common.engine.verify_block import uses_rejection
from common.kv_cache.pool import CachePool
from common.model.drafter import Drafter
from common.parallel.vocabulary import Vocabulary
from common.sampling.params import SamplingRows
from common.spec_decode.confidence import calibrate
from common.spec_decode.draft_sampling import DraftResult, markov_draft, spread_draft
from common.spec_decode.verify import VerificationResult


@dataclass(frozen=True, slots=True)
class DraftTensors:
    """Next proposals, still on the device."""

    members: list[int]
    """Which requests of the verify block drafted."""
    by_rejection: list[bool]
    result: DraftResult
    confidences: torch.Tensor


class Proposer:
    """Drafts for requests whose round was just verified. Used by the engine thread only."""

    def __init__(
        self,
        drafter: Drafter,
        pool: CachePool,
        vocabulary: Vocabulary,
        *,
        draft_length: int,
        confidence_temperatures: torch.Tensor,
        device: torch.device,
    ) -> None:
        self._drafter = drafter
        self._pool = pool
        self._vocabulary = vocabulary
        self._draft_length = draft_length
        self._confidence_temperatures = confidence_temperatures
        self._device = device

    def propose(
        self,
        members: list[int],
        requests: list[Request],
        verified: VerificationResult,
        rows_by_group: Sequence[int],
    ) -> DraftTensors:
        """Draft for `requests`, which are the `members` of a verify block. Their tokens are still those before it."""
        index = ints(members, self._device)
        num_accepted = verified.num_accepted[index]
        anchor_ids = verified.token_ids[index].gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        anchor_positions = (
            ints([len(request.tokens) for request in requests], self._device) + num_accepted
        )
        block = self._drafter.draft_block(
            anchor_ids,
            anchor_positions,
            ints([request.drafter_valid_from for request in requests], self._device),
            ints([request.slot for request in requests], self._device),
            self._pool,
            self._draft_length,
            rows_by_group,
        )
        result = self._draw(requests, anchor_ids, anchor_positions, block.base_logits)
        logits = self._drafter.confidence_logits(block.hidden, result.embeddings)
        return DraftTensors(
            members,
            [_by_rejection(request) for request in requests],
            result,
            calibrate(logits, self._confidence_temperatures),
        )

    def join(self, rows_by_group: Sequence[int]) -> None:
        """Take part in the drafting of other data parallel groups; this one drafts nothing."""
        self._drafter.join(rows_by_group)

    def _draw(
        self,
        requests: list[Request],
        anchor_ids: torch.Tensor,
        anchor_positions: torch.Tensor,
        base_logits: torch.Tensor,
    ) -> DraftResult:
        if self._vocabulary.is_whole:
            return self._draw_by_rule(requests, anchor_ids, anchor_positions, base_logits)
        # Winners are enough but for filters and for distributions that a rejection will compare.
        needs_rows = [each.sampling.is_filtered or _by_rejection(each) for each in requests]
        parts = []
        for draw, is_needing in ((self._draw_winners, False), (self._draw_by_rule, True)):
            members = [i for i, each in enumerate(needs_rows) if each is is_needing]
            if members:
                drawn = draw(
                    [requests[i] for i in members],
                    anchor_ids[members],
                    anchor_positions[members],
                    base_logits[members],
                )
                parts.append((members, drawn))
        return _merged(parts, len(requests))

    def _draw_winners(
        self,
        requests: list[Request],
        anchor_ids: torch.Tensor,
        anchor_positions: torch.Tensor,
        base_logits: torch.Tensor,
    ) -> DraftResult:
        """Requests of which no more than the drawn ids is needed; `base_logits [r, G, P]`."""
        return spread_draft(
            base_logits=base_logits,
            anchor_ids=anchor_ids,
            markov_bias=self._drafter.markov,
            rows=self._rows(requests, anchor_positions),
            vocabulary=self._vocabulary,
        )

    def _draw_by_rule(
        self,
        requests: list[Request],
        anchor_ids: torch.Tensor,
        anchor_positions: torch.Tensor,
        base_logits: torch.Tensor,
    ) -> DraftResult:
        """Each request by its own rule; `base_logits [r, G, P]`."""
        by_rejection = [_by_rejection(request) for request in requests]
        return markov_draft(
            base_logits=base_logits,
            anchor_ids=anchor_ids,
            markov_bias=self._drafter.markov,
            rows=self._rows(requests, anchor_positions),
            coupled=~torch.tensor(by_rejection, device=self._device),
            want_probs=any(by_rejection),
            top_k=[request.sampling.top_k for request in requests],
            vocabulary=self._vocabulary,
        )

    def _rows(self, requests: list[Request], anchor_positions: torch.Tensor) -> SamplingRows:
        """`[r * G]`: how every draft is drawn."""
        offsets = torch.arange(1, self._draft_length + 1, device=self._device)
        positions = (anchor_positions.unsqueeze(1) + offsets).flatten()
        params = [request.sampling for request in requests]
        rows = SamplingRows.of(params, anchor_positions, self._device)
        return rows.repeat(self._draft_length).at(positions)


def _by_rejection(request: Request) -> bool:
    return uses_rejection(request.sampling) and request.role is Role.GENERATE


def _merged(parts: Sequence[tuple[list[int], DraftResult]], num_requests: int) -> DraftResult:
    """Drafts of disjoint sets of requests as one result."""
    if len(parts) == 1:
        return parts[0][1]

    def place(tensors: Sequence[tuple[list[int], torch.Tensor]]) -> torch.Tensor:
        first = tensors[0][1]
        room = first.new_zeros(num_requests, *first.shape[1:])
        for members, tensor in tensors:
            room[members] = tensor
        return room

    probs = [(members, drawn.probs) for members, drawn in parts if drawn.probs is not None]
    return DraftResult(
        token_ids=place([(members, drawn.token_ids) for members, drawn in parts]),
        embeddings=place([(members, drawn.embeddings) for members, drawn in parts]),
        probs=place(probs) if probs else None,
    )
