"""From logits to token ids. Knows one row a token; knows no draft and no request.

A sampled row draws by Gumbel-max: the token that wins `filtered logits + noise(seed, position)`. Its distribution is
exactly `probabilities`, and the draw is a function of the row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.sampling.noise import Purpose, gumbel
from common.sampling.params import SamplingRows


def sample(logits: Tensor, rows: SamplingRows, purpose: Purpose = Purpose.TARGET) -> Tensor:
    """Token ids [N] int64 for logits [N, V] float32; a greedy row takes the first maximum."""
    return winners(filtered_logits(logits, rows), row_noise(rows, purpose, logits.shape[-1]))


def probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The distribution [N, V] that `sample` draws from; one-hot for greedy rows."""
    return filtered_probabilities(filtered_logits(logits, rows), rows)


def filtered_logits(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits over temperature, tokens outside top-k and then top-p at -inf; greedy rows untouched.

    Exactly k tokens pass top-k, and top-p keeps the token that crosses p; of equal logits the lower ids pass first.
    The result may be `logits` itself: do not write to it.
    """
    return kept_logits(scaled_logits(logits, rows), rows)


def scaled_logits(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits over temperature, of all or a part of the vocabulary; greedy rows untouched. May be `logits` itself."""
    if rows.all_greedy:
        return logits
    return logits / rows.temperature.masked_fill(rows.is_greedy, 1.0)[:, None]


def kept_logits(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """What `scaled_logits` made of whole rows, with tokens outside the filters at -inf. May be written in place."""
    if not rows.any_filtered:
        return scaled
    return scaled.masked_fill_(~_kept(scaled, rows), -torch.inf)


def filtered_probabilities(filtered: Tensor, rows: SamplingRows) -> Tensor:
    """`probabilities`, for logits that `filtered_logits` has been through."""
    if not rows.any_greedy:
        return filtered.softmax(-1)
    is_greedy = rows.is_greedy[:, None]
    one_hot = is_greedy.to(filtered.dtype)
    winner = filtered.argmax(-1, keepdim=True)
    if rows.all_greedy:
        return torch.zeros_like(filtered).scatter_(1, winner, one_hot)
    return filtered.softmax(-1).masked_fill_(is_greedy, 0.0).scatter_add_(1, winner, one_hot)


def row_noise(
    rows: SamplingRows,
    purpose: Purpose | Tensor,
    vocab_size: int,
    depth: Tensor | int = 0,
    vocab_offset: int = 0,
) -> Tensor | None:
    """Gumbel noise [N, vocab_size] of tokens `vocab_offset` onwards, zero for greedy rows; None if all are greedy."""
    if rows.all_greedy:
        return None
    noise = gumbel(
        seeds=rows.seed,
        positions=rows.position,
        purpose=purpose,
        vocab_size=vocab_size,
        vocab_offset=vocab_offset,
        depth=depth,
    )
    return noise.masked_fill_(rows.is_greedy[:, None], 0.0) if rows.any_greedy else noise


def winners(filtered: Tensor, noise: Tensor | None) -> Tensor:
    """Token ids [N] with the largest filtered logit plus noise, the first of equals."""
    return (filtered if noise is None else filtered + noise).argmax(-1)


def _kept(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """Which tokens [N, V] pass both filters.

    The kept tokens are a prefix of the row sorted by logit, so its length and its last value describe them; ties with
    that value are then filled up in index order. Sums run over the sorted prefix only, so that a row's result does not
    depend on how wide its neighbours made the sort.
    """
    vocab_size = scaled.shape[-1]
    width = min(rows.filter_width or vocab_size, vocab_size)
    values = scaled.topk(width).values
    rank = torch.arange(width, device=scaled.device)
    passes = rank < rows.top_k.masked_fill(rows.top_k == 0, vocab_size)[:, None]
    mass = (values - values[:, :1]).exp_().mul_(passes).cumsum(-1)
    # Rounding may reach the whole mass before the last token; a top-p of 1 still keeps every one.
    limit = mass[:, -1:] * rows.top_p.masked_fill(rows.top_p >= 1.0, 2.0)[:, None]
    passes[:, 1:] &= mass[:, :-1] < limit
    num_kept = passes.sum(-1, keepdim=True)

    last = values.gather(1, num_kept - 1)
    above = scaled > last
    ties = scaled == last
    open_places = num_kept - above.sum(-1, keepdim=True)
    kept = above.logical_or_(ties.logical_and_(ties.cumsum(-1) <= open_places))
    return kept.logical_or_(~rows.is_filtered[:, None])
