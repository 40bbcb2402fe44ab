"""From a client's request to a `RequestContext` that the model can run. Knows the model's limits; never sees a worker."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace

from common.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from common.tokenizer import Tokenizer
from common.types import RequestContext, SamplingParams, StopParams, Verification
from services.router.requests import (
    ChatPrompt,
    GenerationRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from services.router.served_model import ServedModel

MAX_STOP_TOKEN_IDS = 256

_INLINE_CHARS = 2048
"""Texts up to this length are encoded on the event loop; a thread costs more than their encoding."""


def draw_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbits(63)


class Validator:
    """Checks requests for one served model name."""

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer,
        *,
        seed_source: Callable[[], int] = draw_seed,
    ) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._seed_source = seed_source

    async def context(self, request: GenerationRequest, model: ServedModel) -> RequestContext:
        """The request's context at epoch 0.

        Raises ModelNotFound, ContextLengthExceeded or InvalidRequest; their messages name the field and the limit.
        """
        self._check_model(request.model)
        prompt = await self._prompt_tokens(request.prompt, model)
        stop = _stop_params(request, len(prompt), model)
        return RequestContext(
            request_id=request.request_id,
            epoch=0,
            prompt=prompt,
            sampling=self._resolved_sampling(request.sampling, request.has_seed),
            stop=stop,
        )

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, off the event loop when it is long."""
        match prompt:
            case TokenPrompt(token_ids=token_ids):
                return list(token_ids)
            case TextPrompt(text=text, add_special_tokens=add_special):
                return await _off_loop_if_long(
                    lambda: self._tokenizer.encode(text, add_special_tokens=add_special), len(text)
                )
            case ChatPrompt(messages=messages):
                num_chars = sum(len(message.content) for message in messages)
                return await _off_loop_if_long(
                    lambda: self._tokenizer.encode_chat(messages), num_chars
                )

    def _check_model(self, name: str) -> None:
        if name not in ("", self._model_name):
            raise ModelNotFound(
                f"model {name!r} is not served here; {self._model_name!r} is",
                metadata={"model": name, "available": self._model_name},
            )

    async def _prompt_tokens(self, prompt: Prompt, model: ServedModel) -> tuple[int, ...]:
        limit = model.max_context_length
        least = self._least_tokens(prompt)
        if least >= limit:
            raise _prompt_too_long(f"at least {least}", least, limit)
        tokens = tuple(await self.tokenize(prompt))
        if not tokens:
            raise InvalidRequest("the prompt has no tokens; give at least one")
        if len(tokens) >= limit:
            raise _prompt_too_long(str(len(tokens)), len(tokens), limit)
        _check_token_ids("prompt token", tokens, model.vocab_size)
        return tokens

    def _least_tokens(self, prompt: Prompt) -> int:
        """Spares the encoding of a text that cannot fit however it is encoded."""
        match prompt:
            case TokenPrompt(token_ids=token_ids):
                return len(token_ids)
            case TextPrompt(text=text):
                return self._tokenizer.least_tokens(text)
            case ChatPrompt(messages=messages):
                return sum(self._tokenizer.least_tokens(m.content) for m in messages)

    def _resolved_sampling(self, sampling: SamplingParams, has_seed: bool) -> SamplingParams:
        verification = sampling.verification
        if verification is Verification.AUTO:
            verification = Verification.COUPLED if has_seed else Verification.REJECTION
        seed = sampling.seed if has_seed else self._seed_source()
        return replace(sampling, seed=seed, verification=verification)


def _stop_params(request: GenerationRequest, num_prompt: int, model: ServedModel) -> StopParams:
    limit = model.max_context_length
    max_tokens = limit - num_prompt if request.max_tokens is None else request.max_tokens
    if num_prompt + max_tokens > limit:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, "
            f"{num_prompt + max_tokens} in all; this model's context holds {limit}",
            metadata={
                "prompt_tokens": str(num_prompt),
                "max_tokens": str(max_tokens),
                "limit": str(limit),
            },
        )
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"{len(request.stop_token_ids)} stop_token_ids; at most {MAX_STOP_TOKEN_IDS}"
        )
    _check_token_ids("stop token", request.stop_token_ids, model.vocab_size)
    return StopParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
    )


def _check_token_ids(what: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{what} id {token_id} is not in the vocabulary of {vocab_size}")


def _prompt_too_long(shown: str, num_tokens: int, limit: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"the prompt has {shown} tokens; this model's context holds {limit}, prompt and completion together",
        metadata={"prompt_tokens": str(num_tokens), "limit": str(limit)},
    )


async def _off_loop_if_long(encode: Callable[[], list[int]], num_chars: int) -> list[int]:
    return encode() if num_chars <= _INLINE_CHARS else await asyncio.to_thread(encode)
