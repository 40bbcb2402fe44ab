"""Log-probabilities that are reported to clients. Knows raw logits; temperature and filters do not touch them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenLogprobs(NamedTuple):
    """Log-probabilities at temperature 1 of N drawn tokens and of K alternatives each."""

    logprobs: Tensor  # [N] float32
    top_ids: Tensor  # [N, K] int64, best first
    top_logprobs: Tensor  # [N, K] float32


def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> TokenLogprobs:
    """What a client is told about tokens `ids` [N] drawn from `logits` [N, V] float32."""
    log_mass = logits.logsumexp(-1, keepdim=True)
    top = logits.topk(min(num_top, logits.shape[-1]))
    return TokenLogprobs(
        logprobs=(logits.gather(1, ids[:, None]) - log_mass)[:, 0],
        top_ids=top.indices,
        top_logprobs=top.values - log_mass,
    )
