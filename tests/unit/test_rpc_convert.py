"""Messages and the types they stand for hold the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.rpc import convert
from common.types import (
    FinishReason,
    Proposal,
    RequestContext,
    RequestId,
    SamplingParams,
    StopParams,
    TokenLogprob,
    Verification,
)
from dspark.v1 import types_pb2

FLOAT32 = st.floats(0, 1, width=32)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=5)

SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100, width=32),
    top_k=st.integers(0, 1000),
    top_p=st.floats(0.125, 1, width=32),
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    verification=st.sampled_from(Verification),
)
STOP = st.builds(
    StopParams,
    max_tokens=st.integers(10, 1000),
    min_tokens=st.integers(0, 10),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    stop_token_ids=TOKENS.map(tuple),
    ignore_eos=st.booleans(),
)


@given(
    context=st.builds(
        RequestContext,
        request_id=st.text(max_size=5).map(RequestId),
        epoch=st.integers(0, 9),
        prompt=TOKENS.map(tuple),
        committed=TOKENS,
        sampling=SAMPLING,
        stop=STOP,
    )
)
def test_a_context_survives_the_wire(context: RequestContext) -> None:
    message = convert.context_to_pb(context)
    assert convert.context_from_pb(type(message).FromString(message.SerializeToString())) == context


@given(
    logprob=st.builds(
        TokenLogprob,
        token_id=st.integers(0, 99),
        logprob=FLOAT32,
        top=st.lists(st.tuples(st.integers(0, 99), FLOAT32), max_size=3).map(tuple),
    )
)
def test_a_logprob_survives_the_wire(logprob: TokenLogprob) -> None:
    assert convert.logprob_from_pb(convert.logprob_to_pb(logprob)) == logprob


@given(
    proposal=st.builds(
        Proposal, token_ids=TOKENS.map(tuple), confidences=st.lists(FLOAT32).map(tuple)
    )
)
def test_a_proposal_survives_the_wire(proposal: Proposal) -> None:
    assert convert.proposal_from_pb(convert.proposal_to_pb(proposal)) == proposal


def test_absent_sampling_fields_take_the_documented_defaults() -> None:
    sampling = convert.sampling_from_pb(types_pb2.SamplingParams())
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0)
    assert sampling.logprobs is None
    assert sampling.verification is Verification.AUTO


def test_zero_is_a_value_and_not_absence() -> None:
    message = types_pb2.SamplingParams(temperature=0.0, logprobs=0)
    sampling = convert.sampling_from_pb(message)
    assert sampling.is_greedy
    assert sampling.logprobs == 0


def test_an_absent_bound_is_the_callers_default() -> None:
    assert convert.stop_from_pb(types_pb2.StopParams(), default_max_tokens=12).max_tokens == 12


def test_a_context_without_a_bound_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        convert.context_from_pb(types_pb2.RequestContext())


def test_every_finish_reason_has_a_number() -> None:
    numbers = {convert.finish_reason_to_pb(reason) for reason in FinishReason}
    assert len(numbers) == len(FinishReason) and 0 not in numbers
