"""What a step gives its requests, and its one copy from the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from common.engine.request import Draft
from common.engine.scheduler import ScheduledRequest
from common.engine.verify_block import VerifyBlock
from common.spec_decode.draft_sampling import DraftResult
from common.spec_decode.verify import VerificationResult
from common.types import Proposal, TokenLogprob


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What a step gave one request that reached its newest token."""

    token_ids: tuple[int, ...]
    """Accepted drafts and the target's own token behind them."""
    num_accepted: int
    logprobs: tuple[TokenLogprob, ...]
    draft: Draft | None
    """The next proposal; None when the request does not speculate."""


@dataclass(frozen=True, slots=True)
class DraftTensors:
    """Next proposals, still on the device."""

    members: list[int]
    """Which requests of the verify block drafted."""
    by_rejection: list[bool]
    result: DraftResult
    confidences: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of a verify block, `[R, width]` and `[R, width, top]`."""

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


def to_host(
    block: VerifyBlock,
    verified: VerificationResult,
    logprobs: LogprobTensors | None,
    drafts: DraftTensors | None,
) -> list[RequestOutput]:
    token_ids, num_accepted = verified.token_ids.tolist(), verified.num_accepted.tolist()
    next_drafts = dict(_drafts_to_host(drafts)) if drafts is not None else {}
    return [
        RequestOutput(
            token_ids=tuple(token_ids[i][: num_accepted[i] + 1]),
            num_accepted=num_accepted[i],
            logprobs=_logprobs_to_host(logprobs, i, token_ids[i][: num_accepted[i] + 1], scheduled),
            draft=next_drafts.get(i),
        )
        for i, scheduled in enumerate(block.step)
    ]


def _drafts_to_host(drafts: DraftTensors) -> Iterator[tuple[int, Draft]]:
    token_ids, confidences = drafts.result.token_ids.tolist(), drafts.confidences.tolist()
    for j, member in enumerate(drafts.members):
        probs = None
        if drafts.by_rejection[j] and drafts.result.probs is not None:
            probs = drafts.result.probs[j]
        proposal = Proposal(token_ids=tuple(token_ids[j]), confidences=tuple(confidences[j]))
        yield member, Draft(proposal=proposal, probs=probs)


def _logprobs_to_host(
    logprobs: LogprobTensors | None, index: int, token_ids: list[int], scheduled: ScheduledRequest
) -> tuple[TokenLogprob, ...]:
    num_top = scheduled.request.sampling.logprobs
    if logprobs is None or num_top is None:
        return ()
    chosen = logprobs.chosen[index].tolist()
    top_ids, top = logprobs.top_ids[index].tolist(), logprobs.top[index].tolist()
    return tuple(
        TokenLogprob(
            token_id=token_id,
            logprob=chosen[j],
            top=tuple(zip(top_ids[j][:num_top], top[j][:num_top], strict=True)),
        )
        for j, token_id in enumerate(token_ids)
    )
