"""What the router refuses, and what it fills in."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, ServingError
from common.tokenizer import ChatMessage, Tokenizer
from common.types import RequestContext, SamplingParams, Verification
from services.router.requests import (
    ChatPrompt,
    GenerationRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from services.router.served_model import ServedModel
from services.router.validation import Validator
from tests.support.chat_tokenizer import BOS, USER, write_tokenizer

MODEL = ServedModel(fingerprint="f", max_context_length=100, vocab_size=300, draft_length=7)


@pytest.fixture(scope="module")
def validator(tmp_path_factory: pytest.TempPathFactory) -> Validator:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Validator("tiny", Tokenizer.from_folder(folder), seed_source=lambda: 4711)


def tokens(count: int) -> TokenPrompt:
    return TokenPrompt(token_ids=tuple(range(count)))


async def context_of(validator: Validator, prompt: Prompt, **fields: object) -> RequestContext:
    request = GenerationRequest(prompt=prompt, **fields)  # type: ignore[arg-type]
    return await validator.context(request, MODEL)


async def test_an_absent_bound_is_what_the_context_leaves(validator: Validator) -> None:
    context = await context_of(validator, tokens(40))
    assert context.stop.max_tokens == 60


async def test_prompt_and_bound_may_fill_the_context_exactly(validator: Validator) -> None:
    context = await context_of(validator, tokens(40), max_tokens=60)
    assert context.max_length == 100


async def test_one_token_more_is_refused_with_both_numbers(validator: Validator) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"40.*61.*100") as caught:
        await context_of(validator, tokens(40), max_tokens=61)
    assert caught.value.metadata == {"prompt_tokens": "40", "max_tokens": "61", "limit": "100"}


async def test_a_prompt_must_leave_room_for_a_token(validator: Validator) -> None:
    await context_of(validator, tokens(99))
    with pytest.raises(ContextLengthExceeded, match="100"):
        await context_of(validator, tokens(100))


async def test_a_text_that_cannot_fit_is_refused_without_encoding_it(validator: Validator) -> None:
    with pytest.raises(ContextLengthExceeded, match="at least"):
        await context_of(validator, TextPrompt(text="x" * 10_000_000))


async def test_a_text_gets_its_begin_of_sequence(validator: Validator) -> None:
    assert (await context_of(validator, TextPrompt(text="cat"))).prompt[0] == BOS


async def test_a_chat_is_rendered(validator: Validator) -> None:
    chat = ChatPrompt(messages=(ChatMessage(role="user", content="cat"),))
    assert (await context_of(validator, chat)).prompt[:2] == (BOS, USER)


async def test_an_unseeded_request_gets_a_seed_and_rejection(validator: Validator) -> None:
    sampling = (await context_of(validator, tokens(1), sampling=AUTO)).sampling
    assert (sampling.seed, sampling.verification) == (4711, Verification.REJECTION)


async def test_a_seeded_request_keeps_its_seed_and_is_coupled(validator: Validator) -> None:
    seeded = SamplingParams(seed=5, verification=Verification.AUTO)
    sampling = (await context_of(validator, tokens(1), sampling=seeded, has_seed=True)).sampling
    assert (sampling.seed, sampling.verification) == (5, Verification.COUPLED)


@pytest.mark.parametrize("has_seed", [True, False])
async def test_a_chosen_verification_is_kept(validator: Validator, has_seed: bool) -> None:
    for verification in (Verification.COUPLED, Verification.REJECTION):
        chosen = SamplingParams(seed=5, verification=verification)
        context = await context_of(validator, tokens(1), sampling=chosen, has_seed=has_seed)
        assert context.sampling.verification is verification


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "gpt"}, ModelNotFound),
        ({"prompt": TokenPrompt(token_ids=())}, InvalidRequest),
        ({"prompt": TokenPrompt(token_ids=(5, 300))}, InvalidRequest),
        ({"max_tokens": 0}, InvalidRequest),
        ({"max_tokens": 3, "min_tokens": 4}, InvalidRequest),
        ({"stop_token_ids": (300,)}, InvalidRequest),
        ({"stop_token_ids": (1,) * 257}, InvalidRequest),
        ({"stop": ("",)}, InvalidRequest),
        ({"stop": ("x",) * 17}, InvalidRequest),
        ({"stop": ("x" * 257,)}, InvalidRequest),
        ({"request_id": ""}, InvalidRequest),
        ({"request_id": "x" * 129}, InvalidRequest),
        ({"request_id": "a\nb"}, InvalidRequest),
        ({"request_id": "ä"}, InvalidRequest),
    ],
)
async def test_what_cannot_be_served_is_refused(
    validator: Validator, fields: dict[str, object], error: type[ServingError]
) -> None:
    with pytest.raises(error):
        await context_of(validator, **{"prompt": tokens(3), **fields})  # type: ignore[arg-type]


async def test_a_request_without_an_id_gets_one_of_its_own(validator: Validator) -> None:
    ids = {(await context_of(validator, tokens(1))).request_id for _ in range(10)}
    assert len(ids) == 10


AUTO = SamplingParams(verification=Verification.AUTO)
