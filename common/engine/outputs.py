"""What a step gives its requests, and its one copy from the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from common.engine.proposals import DraftTensors
from common.engine.request import Draft
from common.engine.verification import Verified
from common.engine.verify_block import VerifyBlock
from common.sampling.logprobs import TokenLogprobs, token_logprobs
from common.spec_decode.verify import VerificationResult
from common.types import Proposal, TokenLogprob


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What a step gave one request that reached its newest token."""

    token_ids: tuple[int, ...]
    """Accepted drafts and the target's own token behind them."""
    num_accepted: int
    logprobs: tuple[TokenLogprob, ...]
    draft: Draft | None = None
    """The next proposal; None when the request does not speculate."""


def reported_logprobs(block: VerifyBlock, verified: Verified) -> TokenLogprobs | None:
    """Of the rows `block.reported`, still on the device; None where no client wants any. Refused drafts' rows mean nothing."""
    if verified.reported is None:
        return None
    ids = verified.result.token_ids.flatten()[block.places(block.reported)].clamp(min=0)
    counts = [block.step[i].request.sampling.logprobs or 0 for i in block.reporting]
    return token_logprobs(verified.reported, ids, max(counts))


def to_host(
    block: VerifyBlock, verified: VerificationResult, logprobs: TokenLogprobs | None
) -> list[RequestOutput]:
    """What the requests of a block gain, without their next proposals."""
    token_ids, num_accepted = verified.token_ids.tolist(), verified.num_accepted.tolist()
    tokens = [tuple(ids[: count + 1]) for ids, count in zip(token_ids, num_accepted, strict=True)]
    next_logprobs = dict(_logprobs_to_host(logprobs, block, tokens)) if logprobs is not None else {}
    return [
        RequestOutput(
            token_ids=tokens[i],
            num_accepted=num_accepted[i],
            logprobs=next_logprobs.get(i, ()),
        )
        for i in range(len(block.step))
    ]


def add_drafts(outputs: Sequence[RequestOutput], drafts: DraftTensors) -> None:
    """Give those that drafted their proposals."""
    for member, draft in _drafts_to_host(drafts):
        outputs[member].draft = draft


def _drafts_to_host(drafts: DraftTensors) -> Iterator[tuple[int, Draft]]:
    token_ids, confidences = drafts.result.token_ids.tolist(), drafts.confidences.tolist()
    for j, member in enumerate(drafts.members):
        probs = None
        if drafts.by_rejection[j] and drafts.result.probs is not None:
            probs = drafts.result.probs[j]
        proposal = Proposal(token_ids=tuple(token_ids[j]), confidences=tuple(confidences[j]))
        yield member, Draft(proposal=proposal, probs=probs)


def _logprobs_to_host(
    logprobs: TokenLogprobs, block: VerifyBlock, tokens: list[tuple[int, ...]]
) -> Iterator[tuple[int, tuple[TokenLogprob, ...]]]:
    values = zip(*(each.tolist() for each in logprobs), strict=True)
    for member in block.reporting:
        num_top = block.step[member].request.sampling.logprobs
        rows = list(islice(values, block.num_draft[member] + 1))
        yield (
            member,
            tuple(
                TokenLogprob(
                    token_id=token_id,
                    logprob=logprob,
                    top=tuple(zip(top_ids[:num_top], top[:num_top], strict=True)),
                )
                # Behind the last token are rows of refused drafts.
                for token_id, (logprob, top_ids, top) in zip(tokens[member], rows, strict=False)
            ),
        )
