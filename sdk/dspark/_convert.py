"""Values into messages and back. Knows both shapes; sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from dspark import types
from dspark.v1 import inference_service_pb2 as pb
from dspark.v1 import types_pb2, worker_pb2

Message = types.ChatMessage | Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]

_VERIFICATIONS: dict[types.Verification, types_pb2.Verification] = {
    "auto": types_pb2.VERIFICATION_UNSPECIFIED,
    "rejection": types_pb2.VERIFICATION_REJECTION,
    "coupled": types_pb2.VERIFICATION_COUPLED,
}
_VERIFICATION_WORDS = {value: word for word, value in _VERIFICATIONS.items()}
_FINISH_REASONS: dict[int, types.FinishReason] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
}
_ROLES: dict[int, types.WorkerRole] = {
    pb.WORKER_ROLE_PREFILL: "prefill",
    pb.WORKER_ROLE_DECODE: "decode",
}
_STATES: dict[int, types.WorkerState] = {
    pb.WORKER_STATE_READY: "ready",
    pb.WORKER_STATE_DRAINING: "draining",
    pb.WORKER_STATE_UNREACHABLE: "unreachable",
}


def generate_request(
    prompt: Prompt,
    *,
    request_id: str,
    model: str,
    sampling: types.SamplingParams,
    stop: types.StopParams,
) -> pb.GenerateRequest:
    """Raises TypeError or ValueError when `prompt` is none of text, token ids and chat messages."""
    request = pb.GenerateRequest(
        request_id=request_id,
        model=model,
        sampling=_sampling_to_pb(sampling),
        stop=_stop_to_pb(stop),
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif not prompt:
        raise ValueError("the prompt is empty; give text, token ids or chat messages")
    elif isinstance(prompt[0], int):
        request.tokens.token_ids.extend(cast("Sequence[int]", prompt))
    else:
        request.chat.CopyFrom(_chat_to_pb(cast("Sequence[Message]", prompt)))
    return request


def tokenize_request(
    prompt: str | Sequence[Message], *, add_special_tokens: bool
) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.chat.CopyFrom(_chat_to_pb(prompt))
    return request


def event_from_pb(response: pb.GenerateResponse) -> types.GenerationEvent:
    return types.GenerationEvent(
        token_ids=tuple(response.token_ids),
        text=response.text,
        logprobs=tuple(_logprob_from_pb(entry) for entry in response.logprobs),
    )


def completion_from_pb(
    end: pb.Completion,
    *,
    request_id: str,
    text: str,
    token_ids: tuple[int, ...],
    logprobs: tuple[types.TokenLogprob, ...],
) -> types.Completion:
    return types.Completion(
        request_id=request_id,
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=_FINISH_REASONS.get(end.finish_reason, "unspecified"),
        matched_stop=end.matched_stop if end.HasField("matched_stop") else None,
        matched_token_id=end.matched_token_id if end.HasField("matched_token_id") else None,
        usage=_usage_from_pb(end.usage),
        timings=_timings_from_pb(end.timings),
        route=_route_from_pb(end.route),
    )


def model_info_from_pb(response: pb.GetModelInfoResponse) -> types.ModelInfo:
    return types.ModelInfo(
        model=response.model,
        max_context_length=response.max_context_length,
        vocab_size=response.vocab_size,
        eos_token_ids=tuple(response.eos_token_ids),
        bos_token_id=response.bos_token_id,
        draft_length=response.draft_length,
        fingerprint=response.fingerprint,
        default_sampling=_sampling_from_pb(response.default_sampling),
    )


def server_info_from_pb(response: pb.GetServerInfoResponse) -> types.ServerInfo:
    return types.ServerInfo(
        version=response.version,
        role=response.role,
        uptime_s=response.uptime_s,
        queued_requests=response.queued_requests,
        running_requests=response.running_requests,
        details=dict(response.details),
        workers={address: _worker_info_from_pb(info) for address, info in response.workers.items()},
    )


def _worker_info_from_pb(info: worker_pb2.WorkerInfo) -> types.WorkerInfo:
    mesh = info.mesh
    return types.WorkerInfo(
        role=info.role,
        version=info.version,
        uptime_s=info.uptime_s,
        num_pages=info.num_pages,
        num_free_pages=info.num_free_pages,
        num_slots=info.num_slots,
        num_free_slots=info.num_free_slots,
        mesh=types.WorkerMesh(
            dp=mesh.dp, tp=mesh.tp, ep=mesh.ep, num_ranks=mesh.num_ranks, device=mesh.device
        ),
        memory=tuple(_rank_memory_from_pb(memory) for memory in info.memory),
        details=dict(info.details),
    )


def _rank_memory_from_pb(memory: worker_pb2.RankMemory) -> types.RankMemory:
    return types.RankMemory(
        rank=memory.rank,
        device=memory.device,
        claims=tuple(
            types.MemoryClaim(owner=claim.owner, kind=claim.kind, num_bytes=claim.num_bytes)
            for claim in memory.claims
        ),
    )


def worker_from_pb(worker: pb.Worker) -> types.Worker:
    return types.Worker(
        address=worker.address,
        role=_ROLES.get(worker.role, "unspecified"),
        state=_STATES.get(worker.state, "unspecified"),
        generation=worker.generation,
        running_requests=worker.running_requests,
        pending_tokens=worker.pending_tokens,
    )


def _chat_to_pb(messages: Sequence[Message]) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[_message_to_pb(message) for message in messages])


def _message_to_pb(message: Message) -> pb.ChatMessage:
    if isinstance(message, types.ChatMessage):
        return pb.ChatMessage(role=message.role, content=message.content)
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise TypeError(f"a chat message has exactly 'role' and 'content', not {message!r}")
    return pb.ChatMessage(role=message["role"], content=message["content"])


def _sampling_to_pb(sampling: types.SamplingParams) -> types_pb2.SamplingParams:
    if sampling.verification not in _VERIFICATIONS:
        raise ValueError(f"verification is {sampling.verification!r}; give {list(_VERIFICATIONS)}")
    return types_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        verification=_VERIFICATIONS[sampling.verification],
    )


def _sampling_from_pb(sampling: types_pb2.SamplingParams) -> types.SamplingParams:
    return types.SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        verification=_VERIFICATION_WORDS.get(sampling.verification, "auto"),
    )


def _stop_to_pb(stop: types.StopParams) -> types_pb2.StopParams:
    return types_pb2.StopParams(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop=stop.stop,
        stop_token_ids=stop.stop_token_ids,
        ignore_eos=stop.ignore_eos,
    )


def _logprob_from_pb(entry: types_pb2.TokenLogprob) -> types.TokenLogprob:
    return types.TokenLogprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        top=tuple(
            types.TopLogprob(token_id=top.token_id, logprob=top.logprob) for top in entry.top
        ),
    )


def _usage_from_pb(usage: pb.Usage) -> types.Usage:
    return types.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        rounds=usage.rounds,
        draft_tokens=usage.draft_tokens,
        accepted_tokens=usage.accepted_tokens,
    )


def _timings_from_pb(timings: pb.Timings) -> types.Timings:
    return types.Timings(
        queue_s=timings.queue_s,
        prefill_s=timings.prefill_s,
        handoff_s=timings.handoff_s,
        time_to_first_token_s=timings.time_to_first_token_s,
        total_s=timings.total_s,
    )


def _route_from_pb(route: pb.Route) -> types.Route:
    return types.Route(
        prefill_worker=route.prefill_worker,
        decode_worker=route.decode_worker,
        transfer_engine=route.transfer_engine,
        replacements=route.replacements,
        drafter_fallback=route.drafter_fallback,
    )
