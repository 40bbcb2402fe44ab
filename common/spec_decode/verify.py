"""Which drafts a target forward accepts, and the target's own token after them. Knows rows; knows no cache.

Three rules, chosen per request and round. *Greedy*: accept while the target's argmax equals the draft. *Coupled*: the
same with the target's Gumbel-max draw in place of the argmax. *Rejection*: accept a draft d with probability
min(1, p(d) / q(d)); replace the first refused one by a draw from the residual, proportional to max(p - q, 0).

Why rounds of different rules may follow one another, and a scheduler may cut proposals by confidences old and new:

Fix the tokens before position n; p is the target's distribution at n. A coupled round settles n by TARGET noise of n. A
rejection round settles it by RESIDUAL noise of n alone (the bonus after the last draft verified), or by DRAFT, ACCEPT
and RESIDUAL noise of n: p = min(p, q) + (1 - sum min(p, q)) * residual. Each way yields exactly p, if its noise
was not looked at before. It was not: acceptance is a prefix, so no decision about a position looks at ACCEPT, RESIDUAL
or TARGET noise of a later one, and the survival that admits a draft sees only the drafts before it. Drafts and
confidences of *earlier* proposals, which a lagged budget looks at, may reach beyond n; but a rejection proposal draws
with noise of its own (its depth at n differs), and a coupled one with TARGET noise, which a rejection round never uses.
So the noise that settles n is independent of everything that chose the way, and by induction every token has its exact
conditional distribution. Requests that are always coupled need none of this: no width changes a token of theirs.

One duty is the scheduler's: a coupled round that rejection rounds follow is the first of its placement, and is cut by
the confidences of its own proposal only, since an older one would have shown the TARGET noise that it is settled by.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.sampling.noise import Purpose, uniform
from common.sampling.params import SamplingRows
from common.sampling.sampler import (
    filtered_logits,
    filtered_probabilities,
    row_noise,
    winners,
)

NO_TOKEN = -1
"""Fills a result's rows after the last token."""

_MIN_RESIDUAL_MASS = 1e-8
"""Less is rounding: p and q are equal, and p is drawn from instead."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerificationResult:
    """What R requests gain by a round: `num_accepted + 1` tokens each."""

    token_ids: (
        Tensor  # [R, L + 1] int64: accepted drafts, then the target's own token, then NO_TOKEN
    )
    num_accepted: Tensor  # [R] int64


def verify(
    *,
    logits: Tensor,
    draft_ids: Tensor,
    num_draft: Tensor,
    rows: SamplingRows,
    rejection: Tensor,
    draft_probs: Tensor | None,
) -> VerificationResult:
    """Check up to L drafts of R requests against one target forward.

    `logits` [R, L + 1, V] float32: row j predicts what draft j claims, the row after the last draft predicts the bonus.
    `draft_ids` [R, L] int64, of which request r brings the first `num_draft[r]`; later ids and logits are ignored.
    `rows` has R * (L + 1) entries, requests outermost, each with the position that its logits predict.
    `rejection` [R] bool asks for rejection where the request is sampled, and needs `draft_probs` [R, L, V], what the
    drafts were drawn from; None says that no request of the batch asks for it with drafts. All others are greedy or
    coupled by their temperature.
    """
    num_requests, width, vocab_size = logits.shape
    purpose = torch.where(rejection, Purpose.RESIDUAL, Purpose.TARGET).repeat_interleave(width)
    filtered = filtered_logits(logits.view(-1, vocab_size), rows)
    noise = row_noise(rows, purpose, vocab_size)
    target_ids = winners(filtered, noise).view(num_requests, width)
    if draft_probs is None or noise is None or width == 1:
        return verify_drawn(target_ids=target_ids, draft_ids=draft_ids, num_draft=num_draft)

    drawn = verify_drawn(target_ids=target_ids, draft_ids=draft_ids, num_draft=num_draft)
    tried = verify_by_rejection(
        target_probs=filtered_probabilities(filtered, rows).view(logits.shape)[:, :-1],
        noise=noise.view(logits.shape)[:, :-1],
        bonus_ids=target_ids.gather(1, num_draft[:, None])[:, 0],
        draft_ids=draft_ids,
        num_draft=num_draft,
        rows=rows,
        draft_probs=draft_probs,
    )
    rejection = rejection & ~rows.is_greedy.view(num_requests, width)[:, 0]
    return VerificationResult(
        token_ids=torch.where(rejection[:, None], tried.token_ids, drawn.token_ids),
        num_accepted=torch.where(rejection, tried.num_accepted, drawn.num_accepted),
    )


def verify_drawn(*, target_ids: Tensor, draft_ids: Tensor, num_draft: Tensor) -> VerificationResult:
    """Accept drafts while they equal what the target drew, which `target_ids` [R, L + 1] are; the rest as in `verify`."""
    column = torch.arange(target_ids.shape[1], device=target_ids.device)
    matches = (target_ids[:, :-1] == draft_ids) & (column[:-1] < num_draft[:, None])
    num_accepted = _prefix_length(matches)
    return VerificationResult(
        token_ids=target_ids.masked_fill(column > num_accepted[:, None], NO_TOKEN),
        num_accepted=num_accepted,
    )


def verify_by_rejection(
    *,
    target_probs: Tensor,
    noise: Tensor,
    bonus_ids: Tensor,
    draft_ids: Tensor,
    num_draft: Tensor,
    rows: SamplingRows,
    draft_probs: Tensor,
) -> VerificationResult:
    """Accept drafts with probability min(1, p / q); the rest as in `verify`.

    `target_probs` p [R, L, V], `draft_probs` q and `noise`, which replaces a refused draft, are needed of a request's
    drafts alone. `bonus_ids` [R] are the target's draws behind the last of them.
    """
    column = torch.arange(draft_ids.shape[1] + 1, device=draft_ids.device)
    is_draft = column[:-1] < num_draft[:, None]
    survives = _survives_rejection(target_probs, draft_probs, draft_ids, rows) & is_draft
    num_accepted = _prefix_length(survives)
    replacement = _residual_draw(target_probs, draft_probs, noise, num_accepted)
    own_ids = torch.where(num_accepted < num_draft, replacement, bonus_ids)
    token_ids = torch.where(column == num_accepted[:, None], own_ids[:, None], NO_TOKEN)
    is_accepted = column[:-1] < num_accepted[:, None]
    token_ids[:, :-1] = torch.where(is_accepted, draft_ids, token_ids[:, :-1])
    return VerificationResult(token_ids=token_ids, num_accepted=num_accepted)


def _prefix_length(accepted: Tensor) -> Tensor:
    """Leading true entries of [R, L] bool."""
    return accepted.cumprod(-1).sum(-1)


def _survives_rejection(
    target_probs: Tensor, draft_probs: Tensor, draft_ids: Tensor, rows: SamplingRows
) -> Tensor:
    """[R, L] bool: u < p / q, each draft by itself."""
    num_requests, num_drafts, vocab_size = target_probs.shape
    ids = draft_ids.clamp(0, vocab_size - 1)[..., None]  # padding holds any number
    p = target_probs.gather(-1, ids)[..., 0]
    q = draft_probs.gather(-1, ids)[..., 0]
    u = uniform(seeds=rows.seed, positions=rows.position, purpose=Purpose.ACCEPT)
    return u.view(num_requests, num_drafts + 1)[:, :-1] * q < p


def _residual_draw(
    target_probs: Tensor, draft_probs: Tensor, noise: Tensor, num_accepted: Tensor
) -> Tensor:
    """Token ids [R] from max(p - q, 0) at the first refused draft; meaningless where none was refused."""
    num_requests, num_drafts, _ = target_probs.shape
    request = torch.arange(num_requests, device=num_accepted.device)
    column = num_accepted.clamp(max=num_drafts - 1)
    p = target_probs[request, column]
    residual = (p - draft_probs[request, column]).clamp_(min=0.0)
    residual = torch.where(residual.sum(-1, keepdim=True) > _MIN_RESIDUAL_MASS, residual, p)
    return winners(residual.log_(), noise[request, column])
