"""The left-to-right draw of a draft. Knows the Markov head as a function; knows no drafter and no cache.

Letters: R requests, G drafts of each, V vocabulary, P this rank's part of it, r width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.parallel.vocabulary import Vocabulary
from common.sampling.noise import Purpose
from common.sampling.params import SamplingRows
from common.sampling.sampler import filtered_probabilities, row_noise, winners
from common.sampling.spread import spread_filtered, spread_noise, spread_winners

MarkovBias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Previous ids [R] to the bias [R, P] on the next logits and the embedding [R, r] that made it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftResult:
    """G drafts for each of R requests."""

    token_ids: Tensor  # [R, G] int64
    embeddings: (
        Tensor  # [R, G, r]: the Markov embedding before each draft, which its confidence needs
    )
    probs: Tensor | None  # [R, G, V] float32: what each draft was drawn from, where wanted


def markov_draft(
    *,
    base_logits: Tensor,
    anchor_ids: Tensor,
    markov_bias: MarkovBias,
    rows: SamplingRows,
    coupled: Tensor,
    want_probs: bool,
    top_k: Sequence[int],
    vocabulary: Vocabulary,
) -> DraftResult:
    """Draw G drafts a request, each given the one before; the first follows the anchor.

    `base_logits` [R, G, P] float32, `anchor_ids` [R] int64. `rows` has R * G entries, requests outermost, each with the
    position that its draft will have; temperature, top-k and top-p act as they will on the target, since a draft that
    these filters exclude there is never accepted. Requests with `coupled` [R] bool draw with the noise that the target
    will draw with, which makes agreement likely; the others with noise of their own, which rejection requires, and which
    is new for every proposal (`verify` says why). `top_k` [R] is that of `rows`, known on the host.
    """
    num_requests, num_draft = base_logits.shape[:2]
    purpose = torch.where(coupled, Purpose.TARGET, Purpose.DRAFT).repeat_interleave(num_draft)
    depth = torch.arange(num_draft, device=coupled.device) * ~coupled[:, None]
    noise = row_noise(rows, purpose, vocabulary.size, depth.flatten())
    shape = (num_requests, num_draft, vocabulary.size)
    noise_of = None if noise is None else noise.view(shape)
    probs = base_logits.new_empty(shape) if want_probs else None

    def draw(logits: Tensor, k: int) -> Tensor:
        step = rows.select(slice(k, None, num_draft))
        filtered = spread_filtered(logits, step, top_k, vocabulary)
        if probs is not None:
            probs[:, k] = filtered_probabilities(filtered, step)
        return winners(filtered, None if noise_of is None else noise_of[:, k])

    token_ids, embeddings = _chain(base_logits, anchor_ids, markov_bias, draw)
    return DraftResult(token_ids=token_ids, embeddings=embeddings, probs=probs)


def spread_draft(
    *,
    base_logits: Tensor,
    anchor_ids: Tensor,
    markov_bias: MarkovBias,
    rows: SamplingRows,
    vocabulary: Vocabulary,
) -> DraftResult:
    """`markov_draft` over parts of the vocabulary, for requests that need no more than winners.

    They are greedy or coupled, and have no filters.
    """
    num_draft = base_logits.shape[1]
    noise = spread_noise(rows, Purpose.TARGET, vocabulary)
    noise_of = None if noise is None else noise.view(base_logits.shape)

    def draw(logits: Tensor, k: int) -> Tensor:
        step = rows.select(slice(k, None, num_draft))
        return spread_winners(
            logits, step, None if noise_of is None else noise_of[:, k], vocabulary
        )

    token_ids, embeddings = _chain(base_logits, anchor_ids, markov_bias, draw)
    return DraftResult(token_ids=token_ids, embeddings=embeddings, probs=None)


def _chain(
    base_logits: Tensor,
    anchor_ids: Tensor,
    markov_bias: MarkovBias,
    draw: Callable[[Tensor, int], Tensor],
) -> tuple[Tensor, Tensor]:
    """Ids [R, G] and embeddings [R, G, r]; `draw` turns the logits [R, P] of draft k into ids [R]."""
    token_ids, embeddings = [], []
    previous = anchor_ids
    for k in range(base_logits.shape[1]):
        bias, embedding = markov_bias(previous)
        previous = draw(base_logits[:, k] + bias, k)
        token_ids.append(previous)
        embeddings.append(embedding)
    return torch.stack(token_ids, 1), torch.stack(embeddings, 1)
