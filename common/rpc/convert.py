"""Messages of types.proto to `common.types` and back. Knows both; decides nothing beyond stated defaults."""

from __future__ import annotations

from collections.abc import Iterable

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
from dspark.v1 import handoff_service_pb2, types_pb2

_VERIFICATION_TO_PB = {
    Verification.AUTO: types_pb2.VERIFICATION_UNSPECIFIED,
    Verification.REJECTION: types_pb2.VERIFICATION_REJECTION,
    Verification.COUPLED: types_pb2.VERIFICATION_COUPLED,
}
_VERIFICATION_FROM_PB = {value: key for key, value in _VERIFICATION_TO_PB.items()}

_FINISH_REASON_TO_PB = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
}


def sampling_from_pb(message: types_pb2.SamplingParams) -> SamplingParams:
    """Absent fields take the documented defaults, an absent seed 0. Raises InvalidRequest on a bad value."""
    defaults = SamplingParams()
    return SamplingParams(
        temperature=message.temperature
        if message.HasField("temperature")
        else defaults.temperature,
        top_k=message.top_k if message.HasField("top_k") else defaults.top_k,
        top_p=message.top_p if message.HasField("top_p") else defaults.top_p,
        seed=message.seed if message.HasField("seed") else defaults.seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        # A value of a newer client is not known here; AUTO is always right.
        verification=_VERIFICATION_FROM_PB.get(message.verification, Verification.AUTO),
    )


def sampling_to_pb(sampling: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        verification=_VERIFICATION_TO_PB[sampling.verification],
    )


def stop_from_pb(message: types_pb2.StopParams, *, default_max_tokens: int) -> StopParams:
    """`default_max_tokens` stands for an absent bound. Raises InvalidRequest on a bad value."""
    return StopParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else default_max_tokens,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def stop_to_pb(stop: StopParams) -> types_pb2.StopParams:
    return types_pb2.StopParams(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop=stop.stop,
        stop_token_ids=stop.stop_token_ids,
        ignore_eos=stop.ignore_eos,
    )


def context_from_pb(message: types_pb2.RequestContext) -> RequestContext:
    """Raises InvalidRequest when the context lacks what a router always sets."""
    return RequestContext(
        request_id=RequestId(message.request_id),
        epoch=message.epoch,
        prompt=tuple(message.prompt_token_ids),
        committed=list(message.committed_token_ids),
        sampling=sampling_from_pb(message.sampling),
        stop=stop_from_pb(message.stop, default_max_tokens=0),
    )


def context_to_pb(context: RequestContext) -> types_pb2.RequestContext:
    return types_pb2.RequestContext(
        request_id=context.request_id,
        epoch=context.epoch,
        prompt_token_ids=context.prompt,
        committed_token_ids=context.committed,
        sampling=sampling_to_pb(context.sampling),
        stop=stop_to_pb(context.stop),
    )


def logprob_from_pb(message: types_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        token_id=message.token_id,
        logprob=message.logprob,
        top=tuple((top.token_id, top.logprob) for top in message.top),
    )


def logprobs_from_pb(messages: Iterable[types_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(logprob_from_pb(message) for message in messages)


def logprob_to_pb(logprob: TokenLogprob) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        top=[types_pb2.TopLogprob(token_id=token, logprob=value) for token, value in logprob.top],
    )


def proposal_from_pb(message: handoff_service_pb2.Proposal) -> Proposal:
    return Proposal(token_ids=tuple(message.token_ids), confidences=tuple(message.confidences))


def proposal_to_pb(proposal: Proposal) -> handoff_service_pb2.Proposal:
    return handoff_service_pb2.Proposal(
        token_ids=proposal.token_ids, confidences=proposal.confidences
    )


def finish_reason_to_pb(reason: FinishReason) -> types_pb2.FinishReason:
    return _FINISH_REASON_TO_PB[reason]
