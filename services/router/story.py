"""How a request went, told at its end: one line in the log, and a span. Knows figures; never a prompt or a text."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from common.telemetry.tracing import Span, Value
from services.router.requests import GenerationRequest, Route, Timings, Usage
from services.router.trace_stages import Stage, TraceStages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Everything that may be told of a request."""

    request: GenerationRequest
    model: str
    """As it is served here."""
    finish_reason: str
    """Empty when it failed."""
    error: str
    """The reason of the failure, as the errors catalogue has it; empty when there was none."""
    cause: str
    """One sentence about the failure; empty where nothing is known of it."""
    usage: Usage | None
    """None when the request was refused before it was known."""
    timings: Timings
    route: Route
    num_from_leases: int


def log_story(story: Story) -> None:
    """The request's one line at INFO. Fields, so that a machine can read them."""
    timings, route, usage = story.timings, story.route, story.usage
    fields: dict[str, object] = {
        "request_id": story.request.request_id,
        "model": story.model,
        "operation": story.request.operation,
        "finish_reason": story.finish_reason,
        "error": story.error,
        "cause": story.cause,
        "queue_s": round(timings.queue_s, 4),
        "ttft_s": round(timings.time_to_first_token_s, 4),
        "duration_s": round(timings.total_s, 4),
        "prefill_worker": route.prefill_worker,
        "decode_worker": route.decode_worker,
        "transfer_engine": route.transfer_engine,
        "replacements": route.replacements,
        "from_leases": story.num_from_leases,
    }
    if usage is not None:
        fields |= {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "rounds": usage.rounds,
            "draft_tokens": usage.draft_tokens,
            "accepted_tokens": usage.accepted_tokens,
            "accepted_length": round(usage.mean_accepted_length, 3),
        }
    logger.info("request ended", extra={k: v for k, v in fields.items() if v != ""})


def trace_story(span: Span, story: Story, stages: TraceStages) -> None:
    """End the request's span, with a part for each stage that it passed."""
    for passed in stages.passed:
        part = span.child(passed.stage.value, began=passed.began)
        if passed.stage is Stage.DECODE and story.usage is not None:
            part.set(_speculation(story.usage))
        part.end(ended=passed.ended)
    span.set(_asked(story) | _answered(story))
    span.end(ended=stages.passed[-1].ended, error=story.error)


def _asked(story: Story) -> dict[str, Value]:
    """By the conventions for generative AI; no text of the client is among it."""
    request = story.request
    asked: dict[str, Value] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "dspark",
        "gen_ai.request.model": request.model or story.model,
        "gen_ai.request.temperature": request.sampling.temperature,
        "gen_ai.request.top_p": request.sampling.top_p,
        "gen_ai.request.top_k": request.sampling.top_k,
    }
    if request.max_tokens is not None:
        asked["gen_ai.request.max_tokens"] = request.max_tokens
    if request.has_seed:
        asked["gen_ai.request.seed"] = request.sampling.seed
    return asked


def _answered(story: Story) -> dict[str, Value]:
    timings, route = story.timings, story.route
    answered: dict[str, Value] = {
        "gen_ai.response.id": story.request.request_id,
        "gen_ai.response.model": story.model,
        "dspark.time_to_first_token_s": timings.time_to_first_token_s,
        "dspark.prefill_worker": route.prefill_worker,
        "dspark.decode_worker": route.decode_worker,
        "dspark.transfer_engine": route.transfer_engine,
        "dspark.replacements": route.replacements,
        "dspark.drafter_fallback": route.drafter_fallback,
    }
    if story.finish_reason:
        answered["gen_ai.response.finish_reasons"] = (story.finish_reason,)
    if story.usage is not None:
        answered["gen_ai.usage.input_tokens"] = story.usage.prompt_tokens
        answered["gen_ai.usage.output_tokens"] = story.usage.completion_tokens
        answered |= _speculation(story.usage)
    return answered


def _speculation(usage: Usage) -> dict[str, Value]:
    return {
        "dspark.rounds": usage.rounds,
        "dspark.draft_tokens": usage.draft_tokens,
        "dspark.accepted_tokens": usage.accepted_tokens,
        "dspark.accepted_length": usage.mean_accepted_length,
    }
