"""The real model behind a lease: a decode worker that takes over leased state says what the lost one would have said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.engine.build import LoadedEngine, build_engine
from common.engine.settings import EngineSettings
from common.rpc import convert
from common.types import RequestContext, SamplingParams
from dspark.v1 import prefill_service_pb2
from tests.e2e.test_handoff_real_engine import NUM_NEW, a_context, alone
from tests.support.handoff_cluster import Cluster, DecodeStream, cluster
from tests.support.waiting import WAIT_S

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, seed=1234)


@pytest.fixture(scope="module")
def settings(shipped_checkpoint: Path) -> EngineSettings:
    return EngineSettings(
        checkpoint_dir=shipped_checkpoint, num_slots=6, max_context_length=1024, max_step_rows=200
    )


@pytest.fixture(scope="module")
def prefill_engine(settings: EngineSettings) -> LoadedEngine:
    return build_engine(settings)


@pytest.fixture(scope="module")
def lost_engine(settings: EngineSettings) -> LoadedEngine:
    """Of the decode worker that goes away."""
    return build_engine(replace(settings, draft_length=5, num_slots=4))


@pytest.fixture(scope="module")
def next_engine(settings: EngineSettings) -> LoadedEngine:
    """Of the one that takes over, with other rings."""
    return build_engine(replace(settings, num_slots=4))


@pytest.fixture(scope="module")
def plain_engine(settings: EngineSettings) -> LoadedEngine:
    """No speculation, no hand-off: what everything is compared with."""
    return build_engine(replace(settings, speculate=False))


async def begin(it: Cluster, context: RequestContext, at_least: int) -> str:
    """Run a request until so many tokens are committed, which are added to its context, then lose its decode worker."""
    stream = it.stream()
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    first, done = await it.hand_over(context, reserved)
    await stream.next("admitted")
    committed = [first.token_id]
    while len(committed) < at_least:
        verified = await stream.next("verified")
        committed += verified.token_ids
        await stream.commit(context, verified.round, context.length + len(committed))
    stream.call.cancel()
    await it.until(lambda: len(it.decode.reservations) == 0)
    context.committed += committed[:at_least]
    return str(done.lease_id)


async def take_over(
    prefill: Cluster, it: Cluster, context: RequestContext, lease_id: str
) -> list[Any]:
    """The rounds of the request on the decode worker of `it`, from leased state to its end."""
    stream = it.stream()
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    request = prefill_service_pb2.HandOffRequest(
        lease_id=lease_id,
        context=convert.context_to_pb(context),
        ticket=prefill_service_pb2.DecodeTicket(
            decode_address=it.decode_address,
            reservation_id=reserved.reservation_id,
            capability=reserved.capability,
        ),
    )
    await prefill.prefill_stub.HandOff(request, timeout=WAIT_S)
    admitted = await stream.next("admitted")
    assert not admitted.HasField("first_token_id") and not admitted.drafter_fallback
    return await to_the_end(stream, context, context.length)


async def to_the_end(stream: DecodeStream, context: RequestContext, length: int) -> list[Any]:
    rounds = []
    while length < context.max_length:
        verified = await stream.next("verified")
        assert verified.base == length
        length += len(verified.token_ids)
        rounds.append(verified)
        is_last = length >= context.max_length
        await stream.commit(context, verified.round, length, finish=is_last)
    await stream.skip_to("finished")
    return rounds


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    ("num_tokens", "num_committed"),
    [(1, 3), (5, 1), (127, 2), (128, 9), (200, 17), (257, 1), (513, 12)],
)
async def test_text_goes_on_as_if_nothing_had_been_lost(
    num_tokens: int,
    num_committed: int,
    sampling: SamplingParams,
    prefill_engine: LoadedEngine,
    lost_engine: LoadedEngine,
    next_engine: LoadedEngine,
    plain_engine: LoadedEngine,
) -> None:
    async with (
        cluster(prefill_engine, lost_engine) as first,
        cluster(plain_engine, next_engine) as other,
    ):
        context = a_context(num_tokens, sampling=sampling)
        lease_id = await begin(first, context, num_committed)
        again = replace(context, epoch=1)
        rounds = await take_over(first, other, again, lease_id)
        tokens = [*context.committed, *(token for r in rounds for token in r.token_ids)]
        await first.require_clean()
        await other.require_clean()
    assert tokens == alone(plain_engine, replace(context, committed=[]))
    assert len(tokens) == NUM_NEW


async def test_drafts_are_as_good_as_after_a_whole_prefill(
    prefill_engine: LoadedEngine, lost_engine: LoadedEngine, next_engine: LoadedEngine
) -> None:
    """The drafter's rows of the lease and those that the new worker adds make one window: round by round the same drafts
    are looked at and accepted as when prompt and committed tokens are prefilled anew."""
    async with (
        cluster(prefill_engine, lost_engine) as first,
        cluster(prefill_engine, next_engine) as other,
    ):
        context = a_context(300)
        lease_id = await begin(first, context, 7)
        leased = await take_over(first, other, replace(context, epoch=1), lease_id)
    async with cluster(prefill_engine, next_engine) as it:
        again, stream = replace(context, epoch=2), it.stream()
        reserved = await it.reserve(again)
        await stream.admit(again, reserved)
        await it.hand_over(again, reserved)
        await stream.next("admitted")
        computed = await to_the_end(stream, again, again.length + 1)
    figures = [[(r.num_draft, r.num_accepted) for r in rounds] for rounds in (leased, computed)]
    # The round that catches up has no drafts; it ends in the token that a prefill worker would have sampled.
    assert figures[0][0] == (0, 0)
    assert figures[0][1:] == figures[1]
    assert figures[1][0][0] == 7
