"""Verifies the rows of a step, whose vocabulary may be spread over ranks. Knows what each row needs of the others' parts.

*The winner* of a rank's part is enough for the draw of a row without filters: greedy, coupled, or behind the last draft
of a rejection. *Candidates* are enough for a top-k. *The whole row* is needed for what sums over it: top-p alone, the
probabilities that a rejection compares (its drafts' rows), and log-probabilities. Sums of floats depend on their order,
so they run over the row that one rank would have, and every mesh gives the same tokens.

Letters: T rows, R requests, r some of them, V vocabulary, P this rank's part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.engine.verify_block import VerifyBlock
from common.parallel.vocabulary import Vocabulary
from common.sampling.noise import Purpose
from common.sampling.sampler import filtered_logits, row_noise, winners
from common.sampling.spread import spread_filtered, spread_noise, spread_winners
from common.spec_decode.verify import (
    NO_TOKEN,
    VerificationResult,
    verify,
    verify_by_rejection,
    verify_drawn,
)


@dataclass(frozen=True, slots=True)
class Verified:
    """A step's verification."""

    result: VerificationResult
    reported: torch.Tensor | None
    """Whole logits `[., V]` of the rows that log-probabilities are reported of, in the order of `VerifyBlock.reported`."""


def verify_rows(block: VerifyBlock, logits: torch.Tensor, vocabulary: Vocabulary) -> Verified:
    """Check all proposals against `logits [T, P]`, this rank's part of the vocabulary."""
    if vocabulary.is_whole:
        return _verify_whole(block, logits)
    return _verify_spread(block, logits, vocabulary)


def _verify_whole(block: VerifyBlock, logits: torch.Tensor) -> Verified:
    members = range(len(block.step))
    is_padded = len(block.rows) < len(members) * block.width
    padded = logits[block.padded_index()] if is_padded else logits
    result = verify(
        logits=padded.view(len(members), block.width, -1),
        draft_ids=block.draft_ids(members),
        num_draft=block.ints(block.num_draft),
        rows=block.padded_sampling_rows(members),
        rejection=torch.tensor(block.rejection, device=block.device),
        draft_probs=block.draft_probs(members),
    )
    return Verified(result, logits[block.reported] if block.reported else None)


def _verify_spread(block: VerifyBlock, logits: torch.Tensor, vocabulary: Vocabulary) -> Verified:
    target_ids = torch.full((len(block.step) * block.width,), NO_TOKEN, device=block.device)
    known = set(block.reported)
    others = [t for t in range(len(block.rows)) if t not in known]
    drawn = [t for t in others if not _needs_more_than_winner(block, t)]
    filtered = [t for t in others if _needs_more_than_winner(block, t)]
    if drawn:
        rows = block.sampling_rows(drawn)
        noise = spread_noise(rows, _purposes(block, drawn), vocabulary)
        target_ids[block.places(drawn)] = spread_winners(logits[drawn], rows, noise, vocabulary)
    reported = vocabulary.whole(logits[block.reported]) if block.reported else None
    gathered = _gather(block, logits, filtered, reported, vocabulary)
    if gathered is not None:
        target_ids[block.places(gathered.rows)] = winners(gathered.filtered, gathered.noise)
    target_ids = target_ids.view(-1, block.width)
    result = verify_drawn(
        target_ids=target_ids,
        draft_ids=block.draft_ids(range(len(block.step))),
        num_draft=block.ints(block.num_draft),
    )
    rejecting = [i for i, count in enumerate(block.num_draft) if count and block.rejection[i]]
    if rejecting:
        assert gathered is not None, f"{rejecting=} compare probabilities without rows"
        tried = _verify_rejecting(block, rejecting, target_ids[rejecting], gathered)
        result.token_ids[rejecting] = tried.token_ids
        result.num_accepted[rejecting] = tried.num_accepted
    return Verified(result, reported)


def _needs_more_than_winner(block: VerifyBlock, row: int) -> bool:
    i, j = block.rows[row]
    sampling = block.step[i].request.sampling
    compares = block.rejection[i] and j < block.num_draft[i]
    return compares or sampling.is_filtered


def _purposes(block: VerifyBlock, rows: list[int]) -> torch.Tensor:
    purpose_of = (Purpose.TARGET, Purpose.RESIDUAL)
    return block.ints([purpose_of[block.rejection[block.rows[t][0]]] for t in rows])


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Rows of which a winner is not enough."""

    rows: list[int]
    filtered: torch.Tensor  # [., V]
    noise: torch.Tensor | None  # [., V]


def _gather(
    block: VerifyBlock,
    logits: torch.Tensor,
    rows: list[int],
    reported: torch.Tensor | None,
    vocabulary: Vocabulary,
) -> _Gathered | None:
    """The chosen rows behind the reported ones, which are here already; None where there are neither."""
    parts = []
    if reported is not None:
        parts.append(filtered_logits(reported, block.sampling_rows(block.reported)))
    if rows:
        top_k = [block.step[block.rows[t][0]].request.sampling.top_k for t in rows]
        parts.append(spread_filtered(logits[rows], block.sampling_rows(rows), top_k, vocabulary))
    if not parts:
        return None
    rows = block.reported + rows
    noise = row_noise(block.sampling_rows(rows), _purposes(block, rows), vocabulary.size)
    return _Gathered(rows, torch.cat(parts), noise)


def _verify_rejecting(
    block: VerifyBlock, members: list[int], target_ids: torch.Tensor, gathered: _Gathered
) -> VerificationResult:
    """The chosen requests, which have drafts; `target_ids [r, width]` are theirs."""
    place_of = {block.rows[t]: place for place, t in enumerate(gathered.rows)}
    # Behind a request's drafts any of its rows will do: it is not looked at.
    index = block.ints(
        [
            place_of[i, min(j, block.num_draft[i] - 1)]
            for i in members
            for j in range(block.width - 1)
        ]
    )
    draft_probs, noise = block.draft_probs(members), gathered.noise
    assert draft_probs is not None and noise is not None, f"{members=} are not sampled by rejection"
    num_draft = block.ints([block.num_draft[i] for i in members])
    return verify_by_rejection(
        target_probs=gathered.filtered[index].softmax(-1).view(draft_probs.shape),
        noise=noise[index].view(draft_probs.shape),
        bonus_ids=target_ids.gather(1, num_draft[:, None])[:, 0],
        draft_ids=block.draft_ids(members),
        num_draft=num_draft,
        rows=block.padded_sampling_rows(members),
        draft_probs=draft_probs,
    )
