"""Messages of inference_service.proto to the router's own words and back. Decides nothing."""

from __future__ import annotations

from common.errors import InvalidRequest
from common.rpc import convert
from common.tokenizer import ChatMessage
from common.types import RequestId
from dspark.v1 import inference_service_pb2 as pb
from dspark.v1 import types_pb2
from services.router.policy import WorkerState
from services.router.requests import (
    ChatPrompt,
    Chunk,
    Completion,
    GenerationRequest,
    TextPrompt,
    TokenPrompt,
    new_request_id,
)
from services.router.worker import Worker

_WORKER_STATE_TO_PB = {
    WorkerState.UNKNOWN: pb.WORKER_STATE_UNSPECIFIED,
    WorkerState.READY: pb.WORKER_STATE_READY,
    WorkerState.DRAINING: pb.WORKER_STATE_DRAINING,
    WorkerState.UNREACHABLE: pb.WORKER_STATE_UNREACHABLE,
}
_ROLE_TO_PB = {"prefill": pb.WORKER_ROLE_PREFILL, "decode": pb.WORKER_ROLE_DECODE}


def generation_request_from_pb(
    message: pb.GenerateRequest, traceparent: str = ""
) -> GenerationRequest:
    """Raises InvalidRequest when the prompt is missing or a sampling value is out of range."""
    stop = message.stop
    return GenerationRequest(
        prompt=_prompt_from_pb(message),
        request_id=RequestId(message.request_id)
        if message.HasField("request_id")
        else new_request_id(),
        model=message.model,
        sampling=convert.sampling_from_pb(message.sampling),
        has_seed=message.sampling.HasField("seed"),
        max_tokens=stop.max_tokens if stop.HasField("max_tokens") else None,
        min_tokens=stop.min_tokens,
        stop=tuple(stop.stop),
        stop_token_ids=tuple(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        traceparent=traceparent,
    )


def tokenize_prompt_from_pb(message: pb.TokenizeRequest) -> TextPrompt | ChatPrompt:
    """Raises InvalidRequest when there is nothing to tokenize."""
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(text=message.text, add_special_tokens=message.add_special_tokens)
        case "chat":
            return _chat_from_pb(message.chat)
        case _:
            raise InvalidRequest("prompt is missing; give text or chat")


def chunk_to_pb(chunk: Chunk) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id=chunk.request_id,
        token_ids=chunk.token_ids,
        text=chunk.text,
        logprobs=[convert.logprob_to_pb(logprob) for logprob in chunk.logprobs],
        completion=None if chunk.completion is None else _completion_to_pb(chunk.completion),
    )


def default_sampling_to_pb() -> types_pb2.SamplingParams:
    """What applies where a request leaves a field out; seed and log-probabilities have no default."""
    message = convert.sampling_to_pb(convert.sampling_from_pb(types_pb2.SamplingParams()))
    message.ClearField("seed")
    return message


def worker_to_pb(worker: Worker) -> pb.Worker:
    load = worker.load()
    return pb.Worker(
        address=worker.address,
        role=_ROLE_TO_PB[worker.role],
        state=_WORKER_STATE_TO_PB[load.state],
        generation=worker.generation,
        running_requests=load.running_requests,
        pending_tokens=load.pending_tokens,
    )


def _prompt_from_pb(message: pb.GenerateRequest) -> TextPrompt | TokenPrompt | ChatPrompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(text=message.text)
        case "tokens":
            return TokenPrompt(token_ids=tuple(message.tokens.token_ids))
        case "chat":
            return _chat_from_pb(message.chat)
        case _:
            raise InvalidRequest("prompt is missing; give text, tokens or chat")


def _chat_from_pb(message: pb.ChatPrompt) -> ChatPrompt:
    return ChatPrompt(
        messages=tuple(
            ChatMessage(role=turn.role, content=turn.content) for turn in message.messages
        )
    )


def _completion_to_pb(completion: Completion) -> pb.Completion:
    finish, usage = completion.finish, completion.usage
    timings, route = completion.timings, completion.route
    return pb.Completion(
        finish_reason=convert.finish_reason_to_pb(finish.reason),
        matched_stop=finish.matched_stop,
        matched_token_id=finish.matched_token_id,
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            rounds=usage.rounds,
            draft_tokens=usage.draft_tokens,
            accepted_tokens=usage.accepted_tokens,
        ),
        timings=pb.Timings(
            queue_s=timings.queue_s,
            prefill_s=timings.prefill_s,
            handoff_s=timings.handoff_s,
            time_to_first_token_s=timings.time_to_first_token_s,
            total_s=timings.total_s,
        ),
        route=pb.Route(
            prefill_worker=route.prefill_worker,
            decode_worker=route.decode_worker,
            transfer_engine=route.transfer_engine,
            replacements=route.replacements,
            drafter_fallback=route.drafter_fallback,
        ),
    )
