"""The left-to-right draw of a draft. Knows the Markov head as a function; knows no drafter and no cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.sampling.noise import Purpose
from common.sampling.params import SamplingRows
from common.sampling.sampler import (
    filtered_logits,
    filtered_probabilities,
    row_noise,
    winners,
)

Argmax = Callable[[Tensor], Tensor]
"""Logits [R, P] to the ids [R] of the largest, wherever the rest of the vocabulary is."""

MarkovBias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Previous ids [R] to the bias [R, V] on the next logits and the embedding [R, r] that made it."""


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
) -> DraftResult:
    """Draw G drafts a request, each given the one before; the first follows the anchor.

    `base_logits` [R, G, V] float32, `anchor_ids` [R] int64. `rows` has R * G entries, requests outermost, each with the
    position that its draft will have; temperature, top-k and top-p act as they will on the target, since a draft that
    these filters exclude there is never accepted. Requests with `coupled` [R] bool draw with the noise that the target
    will draw with, which makes agreement likely; the others with noise of their own, which rejection requires, and which
    is new for every proposal (`verify` says why).
    """
    num_requests, num_draft, vocab_size = base_logits.shape
    purpose = torch.where(coupled, Purpose.TARGET, Purpose.DRAFT).repeat_interleave(num_draft)
    depth = torch.arange(num_draft, device=coupled.device) * ~coupled[:, None]
    noise = row_noise(rows, purpose, vocab_size, depth.flatten())
    noise_of = None if noise is None else noise.view(base_logits.shape)

    token_ids = anchor_ids.new_empty(num_requests, num_draft)
    probs = torch.empty_like(base_logits) if want_probs else None
    embeddings = []
    previous = anchor_ids
    for k in range(num_draft):
        bias, embedding = markov_bias(previous)
        step = rows.select(slice(k, None, num_draft))
        filtered = filtered_logits(base_logits[:, k] + bias, step)
        previous = winners(filtered, None if noise_of is None else noise_of[:, k])
        token_ids[:, k] = previous
        embeddings.append(embedding)
        if probs is not None:
            probs[:, k] = filtered_probabilities(filtered, step)
    return DraftResult(token_ids=token_ids, embeddings=torch.stack(embeddings, 1), probs=probs)


def greedy_draft(
    *, base_logits: Tensor, anchor_ids: Tensor, markov_bias: MarkovBias, argmax: Argmax
) -> DraftResult:
    """`markov_draft` for greedy requests alone, which need the largest logit and no distribution.

    `base_logits` [R, G, P] and the bias may cover a part of the vocabulary, which `argmax` knows about.
    """
    token_ids, embeddings = [], []
    previous = anchor_ids
    for k in range(base_logits.shape[1]):
        bias, embedding = markov_bias(previous)
        previous = argmax(base_logits[:, k] + bias)
        token_ids.append(previous)
        embeddings.append(embedding)
    return DraftResult(
        token_ids=torch.stack(token_ids, 1), embeddings=torch.stack(embeddings, 1), probs=None
    )
