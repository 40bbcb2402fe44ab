"""What a step's outcome does to its requests. Every rank that keeps a request applies the same rule to it."""

from __future__ import annotations

import time

from common.engine.outputs import RequestOutput
from common.engine.request import Request, RoundResult
from common.engine.scheduler import ScheduledRequest
from common.types import Proposal


def advance_chunk(scheduled: ScheduledRequest) -> Request:
    """More of a prompt is computed."""
    scheduled.request.num_computed += scheduled.num_tokens
    return scheduled.request


def advance_round(scheduled: ScheduledRequest, output: RequestOutput) -> RoundResult:
    """Rejected drafts are dropped by not counting them: position is the only address, so nothing is undone."""
    request = scheduled.request
    base = len(request.tokens)
    proposal = request.draft.proposal if request.draft else Proposal()
    ends_prompt = request.computes_prompt
    request.num_computed += scheduled.num_tokens + output.num_accepted
    request.tokens += output.token_ids
    request.draft = output.draft
    request.round += 1
    request.timings.first_token = request.timings.first_token or time.monotonic()
    assert request.num_computed == len(request.tokens) - 1, (
        f"{request.num_computed=} {len(request.tokens)=}"
    )
    assert request.room >= 0, (
        f"{request.request_id} grew to {len(request.tokens)} of {request.max_length}"
    )
    return RoundResult(
        request=request,
        round=request.round,
        base=base,
        token_ids=output.token_ids,
        num_draft=scheduled.num_draft,
        num_accepted=output.num_accepted,
        confidences=proposal.confidences[: scheduled.num_draft],
        logprobs=output.logprobs,
        num_offered=len(proposal.token_ids),
        ends_prompt=ends_prompt,
    )
