"""A slow client pauses its own request: the router sends no commit for what was not taken, and decode parks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from common.telemetry.metrics import RouterMetrics
from common.tokenizer import Tokenizer
from common.types import RequestId
from services.router.requests import Chunk, GenerationRequest, TokenPrompt
from services.router.router import Router
from tests.support.chat_tokenizer import write_tokenizer
from tests.support.fake_workers import MAX_UNCOMMITTED_ROUNDS, FakeDecode, FakePrefill, serving
from tests.support.router_cluster import SEQUENCE, router_config
from tests.support.waiting import WAIT_S


@pytest.fixture
def decode() -> FakeDecode:
    return FakeDecode(SEQUENCE)


@pytest.fixture
async def router(tmp_path: Path, decode: FakeDecode) -> AsyncIterator[Router]:
    """A router without its own server, so that the test is the consumer and gRPC buffers nothing between."""
    changed = asyncio.Event()
    prefill = FakePrefill(SEQUENCE)
    async with serving(decode) as decode_server, serving(prefill) as prefill_server:
        prefill.decodes = {decode_server.address: decode}
        config = replace(
            router_config(write_tokenizer(tmp_path)),
            prefill_addresses=(prefill_server.address,),
            decode_addresses=(decode_server.address,),
        )
        metrics = RouterMetrics(model="tiny")
        router = Router(config, metrics=metrics, on_change=changed.set)
        watching = asyncio.create_task(router.workers.watch())
        async with asyncio.timeout(WAIT_S):
            while not router.workers.is_ready:
                changed.clear()
                await changed.wait()
        yield router
        watching.cancel()
        await asyncio.wait((watching,))


def request(request_id: str, max_tokens: int) -> GenerationRequest:
    prompt = TokenPrompt(token_ids=(10, 11, 12))
    return GenerationRequest(prompt=prompt, request_id=RequestId(request_id), max_tokens=max_tokens)


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def test_a_client_that_takes_nothing_pauses_its_request_and_no_other(
    router: Router, decode: FakeDecode
) -> None:
    slow = router.pipeline.generate(request("slow", 60), timeout_s=None)
    async with aclosing(slow):
        chunks = [await anext(slow)]
        await decode.seen.until(lambda: decode.num_rounds_sent == MAX_UNCOMMITTED_ROUNDS)
        quick = [
            chunk async for chunk in router.pipeline.generate(request("quick", 60), timeout_s=None)
        ]
        assert tokens_of(quick) == SEQUENCE[:60]
        slow_commits = [commit for commit in decode.commits if commit.request_id == "slow"]
        assert not slow_commits, "nothing is committed beyond what the client has in hand"
        chunks += [chunk async for chunk in slow]
        assert tokens_of(chunks) == SEQUENCE[:60]


async def test_closing_the_iterator_ends_the_request_before_it_returns(
    router: Router, decode: FakeDecode
) -> None:
    generation = router.pipeline.generate(request("r", 60), timeout_s=None)
    await anext(generation)
    await generation.aclose()
    assert len(router.contexts) == 0
    assert all(w.running_requests == 0 and w.pending_tokens == 0 for w in router.workers.decode)
    assert all(w.running_requests == 0 and w.pending_tokens == 0 for w in router.workers.prefill)
    await decode.seen.until(lambda: [abort.request_id for abort in decode.aborts] == ["r"])


async def test_an_abort_frees_the_workers_even_while_the_client_takes_nothing(
    router: Router, decode: FakeDecode
) -> None:
    generation = router.pipeline.generate(request("r", 60), timeout_s=None)
    async with aclosing(generation):
        chunks = [await anext(generation)]
        await decode.seen.until(lambda: decode.num_rounds_sent == MAX_UNCOMMITTED_ROUNDS)
        assert router.contexts.abort("r")
        await decode.seen.until(lambda: bool(decode.aborts))
        chunks += [chunk async for chunk in generation]
        assert tokens_of(chunks) == SEQUENCE[: len(tokens_of(chunks))]
        assert chunks[-1].completion is not None
        assert chunks[-1].completion.usage.completion_tokens == len(tokens_of(chunks))


def test_the_tokenizer_needs_no_weights(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(write_tokenizer(tmp_path)).eos_token_ids == (1,)
