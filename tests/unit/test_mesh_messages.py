"""What ranks tell one another arrives as it was said."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from common.engine.messages import (
    PlannedRun,
    StepMessage,
    outputs_from_bytes,
    outputs_to_bytes,
)
from common.engine.outputs import RequestOutput
from common.engine.request import Draft, Request, Role
from common.engine.runner import StepRows
from common.types import Proposal, RequestId, SamplingParams, TokenLogprob, Verification

COUNTS = st.integers(0, 2**31)
TOKENS = st.lists(st.integers(0, 200_000), max_size=6)
NUMBERS = st.floats(allow_nan=False)
"""Infinities too: the log-probability of what a filter excludes."""
IDS = st.text(min_size=1, max_size=8).map(RequestId)

PROPOSALS = st.integers(0, 7).flatmap(
    lambda length: st.builds(
        Proposal,
        token_ids=st.tuples(*[st.integers(0, 200_000)] * length),
        confidences=st.tuples(*[NUMBERS] * length),
    )
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=COUNTS,
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    verification=st.sampled_from(Verification),
)
REQUESTS = st.builds(
    Request,
    request_id=IDS,
    epoch=COUNTS,
    role=st.sampled_from(Role),
    tokens=TOKENS,
    num_computed=COUNTS,
    max_length=COUNTS,
    sampling=SAMPLING,
    slot=COUNTS,
    block_table=TOKENS,
    group=st.integers(0, 15),
    draft=st.none() | st.builds(Draft, proposal=PROPOSALS),
    drafter_valid_from=COUNTS,
)
RUNS = st.builds(PlannedRun, request_id=IDS, num_tokens=COUNTS, num_draft=st.integers(0, 15))
MESSAGES = st.builds(
    StepMessage,
    changes=st.lists(REQUESTS | IDS, max_size=4).map(tuple),
    rows=st.builds(StepRows, target=TOKENS.map(tuple), drafts=TOKENS.map(tuple)),
    steps=st.lists(st.lists(RUNS, max_size=3).map(tuple), max_size=4).map(tuple),
    is_last=st.booleans(),
)
LOGPROBS = st.builds(
    TokenLogprob,
    token_id=COUNTS,
    logprob=NUMBERS,
    top=st.lists(st.tuples(COUNTS, NUMBERS), max_size=3).map(tuple),
)
OUTPUTS = st.builds(
    RequestOutput,
    token_ids=TOKENS.map(tuple),
    num_accepted=st.integers(0, 15),
    logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
    draft=st.none() | st.builds(Draft, proposal=PROPOSALS),
)


@given(MESSAGES)
def test_a_step_arrives_as_it_was_planned(message: StepMessage) -> None:
    assert StepMessage.from_bytes(message.to_bytes()) == message


@given(st.lists(st.none() | OUTPUTS, max_size=4))
def test_outputs_arrive_as_they_were_given(outputs: list[RequestOutput | None]) -> None:
    assert outputs_from_bytes(outputs_to_bytes(outputs)) == outputs


@given(REQUESTS, st.integers(1, 9))
def test_what_only_a_scheduler_counts_stays_with_it(request: Request, count: int) -> None:
    """A follower is told of a request once, and counts no rounds."""
    told = replace(request, round=count, acknowledged_round=count)
    (heard,) = StepMessage.from_bytes(StepMessage(changes=(told,)).to_bytes()).changes
    assert heard == request


def test_distributions_of_drafts_stay_where_they_were_drawn() -> None:
    proposal = Proposal(token_ids=(1, 2), confidences=(0.5, 0.25))
    output = RequestOutput(
        token_ids=(3,),
        num_accepted=0,
        logprobs=(TokenLogprob(token_id=3, logprob=-math.inf, top=((4, -0.5),)),),
        draft=Draft(proposal=proposal, probs=torch.ones(2, 64)),
    )
    payload = outputs_to_bytes([output, None])
    assert len(payload) < 300
    heard = outputs_from_bytes(payload)
    assert heard == [replace(output, draft=Draft(proposal=proposal)), None]
    assert output.draft is not None and output.draft.probs is not None, "the sender's own is gone"


def test_a_message_without_a_step_says_that_nothing_runs() -> None:
    heard = StepMessage.from_bytes(StepMessage().to_bytes())
    assert not heard.steps and not heard.changes and not heard.is_last
