"""What a step gives its requests, and its one copy from the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from common.engine.proposals import DraftTensors
from common.engine.request import Draft
from common.engine.verify_block import VerifyBlock
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
class LogprobTensors:
    """Log-probabilities of the requests of a verify block that want them, `[r, width]` and `[r, width, top]`."""

    members: list[int]
    """Which requests of the block they are."""
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
    tokens = [tuple(ids[: count + 1]) for ids, count in zip(token_ids, num_accepted, strict=True)]
    next_drafts = dict(_drafts_to_host(drafts)) if drafts is not None else {}
    next_logprobs = dict(_logprobs_to_host(logprobs, block, tokens)) if logprobs is not None else {}
    return [
        RequestOutput(
            token_ids=tokens[i],
            num_accepted=num_accepted[i],
            logprobs=next_logprobs.get(i, ()),
            draft=next_drafts.get(i),
        )
        for i in range(len(block.step))
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
    logprobs: LogprobTensors, block: VerifyBlock, tokens: list[tuple[int, ...]]
) -> Iterator[tuple[int, tuple[TokenLogprob, ...]]]:
    for j, member in enumerate(logprobs.members):
        num_top = block.step[member].request.sampling.logprobs
        chosen = logprobs.chosen[j].tolist()
        top_ids, top = logprobs.top_ids[j].tolist(), logprobs.top[j].tolist()
        yield (
            member,
            tuple(
                TokenLogprob(
                    token_id=token_id,
                    logprob=chosen[k],
                    top=tuple(zip(top_ids[k][:num_top], top[k][:num_top], strict=True)),
                )
                for k, token_id in enumerate(tokens[member])
            ),
        )
