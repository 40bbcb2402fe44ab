"""The real model on both sides of a hand-off: the text is that of one engine that did everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.engine.build import LoadedEngine, build_engine
from common.engine.request import Request, Role
from common.engine.scheduler import DRAFTER_WARMUP_ROWS
from common.engine.settings import EngineSettings
from common.kv_cache.layout import num_pages_for
from common.transfer.config import TransferConfig
from common.types import RequestContext, RequestId, SamplingParams, StopParams
from services.decode.intake import Intake
from services.prefill.config import HandoffConfig
from tests.support.figures import figure
from tests.support.handoff_cluster import Cluster, DecodeStream, cluster
from tests.support.other_drafters import with_two_layers, without_drafter
from tests.support.transfer_engines import engine_params, transfer_config

NUM_NEW = 24
LENGTHS = (1, 2, 5, 127, 128, 129, 255, 256, 257, 511, 512, 513, 3001)
NUM_CROWD = 32


@pytest.fixture(scope="module")
def settings(shipped_checkpoint: Path) -> EngineSettings:
    return EngineSettings(
        checkpoint_dir=shipped_checkpoint, num_slots=6, max_context_length=3328, max_step_rows=200
    )


@pytest.fixture(scope="module")
def prefill_engine(settings: EngineSettings) -> LoadedEngine:
    return build_engine(settings)


@pytest.fixture(scope="module")
def decode_engine(settings: EngineSettings) -> LoadedEngine:
    """Other rings than the prefill worker's: it drafts fewer tokens."""
    return build_engine(replace(settings, draft_length=5, num_slots=4))


@pytest.fixture(scope="module")
def crowd_engines(settings: EngineSettings) -> tuple[LoadedEngine, LoadedEngine]:
    """Prefill's and decode's, each with room for all of a crowd at once."""
    roomy = replace(settings, num_slots=NUM_CROWD, num_pages=3 * NUM_CROWD)
    return build_engine(roomy), build_engine(roomy)


@pytest.fixture(scope="module")
def plain_engine(settings: EngineSettings) -> LoadedEngine:
    """No speculation, no hand-off: what everything is compared with."""
    return build_engine(replace(settings, speculate=False))


def a_context(
    num_tokens: int, *, request_id: str = "r", sampling: SamplingParams | None = None
) -> RequestContext:
    tokens = [0, *((37 * i * i + 11 * i) % 1900 + 100 for i in range(1, num_tokens))]
    return RequestContext(
        request_id=RequestId(request_id),
        epoch=0,
        prompt=tuple(tokens),
        sampling=sampling or SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=NUM_NEW),
    )


def alone(loaded: LoadedEngine, context: RequestContext) -> list[int]:
    """What one engine generates by itself."""
    request = Request(
        request_id=context.request_id,
        epoch=0,
        role=Role.GENERATE,
        tokens=context.tokens,
        max_length=context.max_length,
        sampling=context.sampling,
        slot=0,
        block_table=list(range(num_pages_for(context.max_length))),
    )
    engine = loaded.engine
    engine.add(request)
    while engine.has_work:
        engine.step()
        engine.commit(request.request_id, request.round)
    engine.remove(request.request_id)
    return request.tokens[context.length :]


async def through_both(
    it: Cluster, stream: DecodeStream, context: RequestContext
) -> tuple[list[int], list[Any]]:
    """(generated tokens, rounds) of a request that prefill begins and decode goes on with."""
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    first, _ = await it.hand_over(context, reserved)
    admitted = await stream.next("admitted")
    assert admitted.first_token_id == first.token_id
    tokens, rounds = [first.token_id], []
    while len(tokens) < context.stop.max_tokens:
        verified = await stream.next("verified")
        assert verified.base == context.length + len(tokens)
        tokens += verified.token_ids
        rounds.append(verified)
        is_last = len(tokens) >= context.stop.max_tokens
        await stream.commit(context, verified.round, context.length + len(tokens), finish=is_last)
    await stream.skip_to("finished")
    return tokens, rounds


@pytest.fixture(scope="module")
def expected(plain_engine: LoadedEngine) -> Callable[[RequestContext], list[int]]:
    """Greedy text without hand-off and speculation, computed once for all engines."""
    known: dict[int, list[int]] = {}

    def text(context: RequestContext) -> list[int]:
        if context.length not in known:
            known[context.length] = alone(plain_engine, context)
        return known[context.length]

    return text


@pytest.fixture(params=engine_params("grpc", "nixl", "nixl-tcp", "mooncake"))
def transfer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TransferConfig:
    return transfer_config(request.param, monkeypatch)


async def test_greedy_text_is_the_same_as_without_handoff_and_speculation_at_all_borders(
    transfer: TransferConfig,
    prefill_engine: LoadedEngine,
    decode_engine: LoadedEngine,
    expected: Callable[[RequestContext], list[int]],
) -> None:
    async with cluster(prefill_engine, decode_engine, transfer=transfer) as it:
        stream = it.stream()
        for num_tokens in LENGTHS:
            context = a_context(num_tokens, request_id=f"r{num_tokens}")
            tokens, _ = await through_both(it, stream, context)
            assert tokens == expected(context), f"{num_tokens} tokens"
        registry = it.prefill.metrics.registry
        sent = figure(registry, "dspark_kv_transfer_bytes_total", engine=str(transfer.engine))
        assert sent, f"{transfer.engine} moved nothing"
        await it.require_clean()


class Gathering:
    """Holds hand-offs whose bytes have all come until there are as many as are wanted."""

    def __init__(self, num_wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_there = 0
        everybody, complete = asyncio.Event(), Intake.complete

        async def completed_together(intake: Intake, *result: Any) -> bool:
            self.num_there += 1
            if self.num_there == num_wanted:
                everybody.set()
            await everybody.wait()
            return await complete(intake, *result)

        monkeypatch.setattr(Intake, "complete", completed_together)


async def test_as_many_handoffs_as_there_is_room_for_are_in_progress_at_once_and_none_gets_anothers_text(
    transfer: TransferConfig,
    crowd_engines: tuple[LoadedEngine, LoadedEngine],
    expected: Callable[[RequestContext], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None is completed before all have come, so this does not end unless all of them are between the two workers."""
    lengths = [64 + 2 * index for index in range(NUM_CROWD)]
    contexts = [a_context(length, request_id=f"r{length}") for length in lengths]
    gathering = Gathering(NUM_CROWD, monkeypatch)
    async with cluster(*crowd_engines, transfer=transfer, max_queued=NUM_CROWD) as it:
        texts = await asyncio.gather(
            *(through_both(it, it.stream(), context) for context in contexts)
        )
        assert [tokens for tokens, _ in texts] == [expected(context) for context in contexts]
        assert gathering.num_there == NUM_CROWD, "a state was sent twice"
        await it.require_clean()


async def test_a_seeded_sample_is_the_same_as_without_handoff_and_speculation(
    prefill_engine: LoadedEngine, decode_engine: LoadedEngine, plain_engine: LoadedEngine
) -> None:
    sampling = SamplingParams(temperature=0.8, seed=1234)
    async with cluster(prefill_engine, decode_engine) as it:
        stream = it.stream()
        for num_tokens in (40, 200):
            context = a_context(num_tokens, request_id=f"r{num_tokens}", sampling=sampling)
            tokens, _ = await through_both(it, stream, context)
            assert tokens == alone(plain_engine, context)


async def test_a_worker_that_computes_prompts_itself_gives_the_same_text(
    decode_engine: LoadedEngine, prefill_engine: LoadedEngine, plain_engine: LoadedEngine
) -> None:
    async with cluster(prefill_engine, decode_engine, computes_prompts=True) as it:
        context, stream = a_context(150), it.stream()
        reserved = await it.reserve(context)
        assert reserved.computes_prompt
        await stream.admit(context, reserved)
        assert not (await stream.next("admitted")).HasField("first_token_id")
        tokens: list[int] = []
        while len(tokens) < NUM_NEW:
            verified = await stream.next("verified")
            assert verified.base == context.length + len(tokens)
            tokens += verified.token_ids
            length = context.length + len(tokens)
            await stream.commit(context, verified.round, length, finish=len(tokens) >= NUM_NEW)
        assert tokens == alone(plain_engine, context)


async def test_log_probabilities_of_the_first_token_come_from_both_workers_alike(
    prefill_engine: LoadedEngine, decode_engine: LoadedEngine
) -> None:
    async with cluster(prefill_engine, decode_engine) as it:
        stream = it.stream()
        context = a_context(60, sampling=SamplingParams(temperature=0.0, logprobs=2))
        reserved = await it.reserve(context)
        await stream.admit(context, reserved)
        first, _ = await it.hand_over(context, reserved)
        admitted = await stream.next("admitted")
        assert first.logprob.token_id == first.token_id
        assert len(first.logprob.top) == 2
        assert admitted.first_logprob == first.logprob
        verified = await stream.next("verified")
        assert [each.token_id for each in verified.logprobs] == list(verified.token_ids)
        await stream.abort(context)


async def test_without_drafter_rows_the_text_is_the_same_and_the_fallback_is_said(
    prefill_engine: LoadedEngine, decode_engine: LoadedEngine, plain_engine: LoadedEngine
) -> None:
    handoff = HandoffConfig(sends_drafter_state=False)
    async with cluster(prefill_engine, decode_engine, handoff=handoff) as it:
        context, stream = a_context(150), it.stream()
        tokens, rounds = await through_both(it, stream, context)
        assert tokens == alone(plain_engine, context)
        assert rounds[0].num_draft == 0


@pytest.fixture(scope="module")
def other_drafters(
    settings: EngineSettings, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, LoadedEngine]:
    """The shipped target without its drafter, and with two of its three layers."""
    made = {"none": without_drafter, "shallow": with_two_layers}
    return {
        name: build_engine(
            replace(
                settings,
                checkpoint_dir=make(settings.checkpoint_dir, tmp_path_factory.mktemp(name)),
            )
        )
        for name, make in made.items()
    }


@pytest.mark.parametrize(
    ("at_prefill", "at_decode", "why"),
    [
        ("none", "own", "prefill has no drafter"),
        ("shallow", "own", "cache region drafter: layer_ids is (0, 1, 2) at decode but (0, 1)"),
        ("own", "shallow", "cache region drafter: layer_ids is (0, 1) at decode but (0, 1, 2)"),
        ("own", "none", ""),
    ],
)
async def test_workers_with_other_drafters_give_the_same_text_and_draft_again_after_a_while(
    prefill_engine: LoadedEngine,
    other_drafters: dict[str, LoadedEngine],
    plain_engine: LoadedEngine,
    settings: EngineSettings,
    at_prefill: str,
    at_decode: str,
    why: str,
) -> None:
    engines = {"own": prefill_engine, **other_drafters}
    decode = build_engine(settings) if at_decode == "own" else engines[at_decode]
    async with cluster(engines[at_prefill], decode) as it:
        for number, sampling in enumerate((None, SamplingParams(temperature=0.8, seed=3))):
            context = a_context(300, request_id=f"r{number}", sampling=sampling)
            stop = StopParams(max_tokens=2 * DRAFTER_WARMUP_ROWS)
            context = replace(context, stop=stop)
            tokens, rounds = await through_both(it, it.stream(), context)
            assert tokens == alone(plain_engine, context)
            # Nothing is drafted before the drafter's window has rows of its own again, and then it is as long as ever.
            own_rows = [each.base - context.length for each in rounds]
            drafted = {rows: each.num_draft for rows, each in zip(own_rows, rounds, strict=True)}
            early = {rows for rows in drafted if rows < DRAFTER_WARMUP_ROWS}
            assert not any(drafted[rows] for rows in early)
            assert max(drafted.values()) == (0 if at_decode == "none" else 7)
            if at_decode == "own":
                assert sum(each.num_accepted for each in rounds) > 0
        registry = it.decode.metrics.registry
        assert figure(registry, "dspark_spec_drafter_fallbacks_total") == (2 if why else 0)
        details = it.decode.meetings.details()
        assert why in details[f"drafter_state {it.prefill_address}"]
        await it.require_clean()


async def test_the_first_rounds_draft_as_well_as_those_of_one_engine(
    settings: EngineSettings, prefill_engine: LoadedEngine
) -> None:
    """The drafter's state really travels: round by round the same drafts are looked at and accepted as without a
    hand-off. Without its rows the first round has no drafts at all, so this cannot pass by luck."""
    sink, one = build_engine(settings), build_engine(settings)
    async with cluster(prefill_engine, sink) as it:
        context = a_context(300)
        _, rounds = await through_both(it, it.stream(), context)
        handed_over = [(r.num_draft, r.num_accepted) for r in rounds]
    async with cluster(prefill_engine, one, computes_prompts=True) as it:
        stream = it.stream()
        reserved = await it.reserve(context)
        await stream.admit(context, reserved)
        await stream.next("admitted")
        first = await stream.next("verified")
        await stream.commit(context, first.round, context.length + 1)
        alone_rounds, length = [], context.length + 1
        while length < context.max_length:
            verified = await stream.next("verified")
            alone_rounds.append((verified.num_draft, verified.num_accepted))
            length += len(verified.token_ids)
            await stream.commit(
                context, verified.round, length, finish=length >= context.max_length
            )
    assert handed_over == alone_rounds
    assert handed_over[0][0] == 7
