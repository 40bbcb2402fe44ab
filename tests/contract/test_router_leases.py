"""A request that loses its decode worker goes on from the state that its prefill worker keeps, over sockets, with scripted
workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import TransferFailed
from dspark.v1 import inference_service_pb2 as pb
from services.router import WorkerConfig
from services.router.leases import RENEWALS_PER_LEASE
from tests.support.chat_tokenizer import write_tokenizer
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.router_cluster import (
    SEQUENCE,
    STOP,
    Cluster,
    cluster,
    collect,
    generate_request,
    router_config,
    tokens_of,
    workers_seen,
)
from tests.support.waiting import WAIT_S

RENEWAL_S = 0.05
NUM_PROMPT = 8


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[Cluster]:
    """One prefill worker and two decode workers; every failure that counts ends the request at the second."""
    config = replace(
        router_config(write_tokenizer(tmp_path)),
        workers=WorkerConfig(poll_period_s=0.05, poll_timeout_s=WAIT_S, max_attempts=2),
    )
    decodes = [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
    async with cluster(config, [prefill_with_leases()], decodes) as running:
        yield running


def prefill_with_leases() -> FakePrefill:
    """Its leases are so short that the first renewal soon tells that the router has heard of one."""
    prefill = FakePrefill(SEQUENCE)
    prefill.lease_s = RENEWALS_PER_LEASE * RENEWAL_S
    return prefill


async def begun(
    system: Cluster,
) -> tuple[AsyncIterator[pb.GenerateResponse], list[pb.GenerateResponse]]:
    """A request whose first worker says nothing more: the rest of it, and the two messages that have come. The router has
    heard of its lease."""
    responses = aiter(system.stub.Generate(generate_request(stop=STOP)))
    received = [await anext(responses), await anext(responses)]
    system.decode.round_gate.clear()
    await system.prefill.seen.until(lambda: bool(system.prefill.renewed))
    return responses, received


async def test_the_next_decode_worker_gets_the_leased_state_and_nothing_is_computed_again(
    system: Cluster,
) -> None:
    responses, received = await begun(system)
    system.decode.break_stream()
    received += [response async for response in responses]
    assert tokens_of(received) == SEQUENCE[:30]
    assert len(system.prefill.prefills) == len(system.prefill.handoffs) == 1
    (handoff,) = system.prefill.handoffs
    assert (handoff.lease_id, handoff.context.epoch) == ("reservation-1", 1)
    assert len(handoff.context.committed_token_ids) >= 2
    completion = received[-1].completion
    assert completion.route.replacements == 1
    # A token that only ends what was computed again is no verification: all that count had drafts.
    assert completion.usage.draft_tokens == 2 * completion.usage.rounds > 0
    await system.prefill.seen.until(lambda: system.prefill.released == ["reservation-1"])


async def test_before_anything_was_committed_the_first_token_comes_with_the_state(
    system: Cluster,
) -> None:
    system.prefill.says_first_token = False
    system.decode.admission_gate.clear()
    call = system.stub.Generate(generate_request(stop=STOP))
    receiving = asyncio.create_task(collect(call))
    await system.prefill.seen.until(lambda: bool(system.prefill.renewed))
    system.decode.break_stream()
    assert tokens_of(await receiving) == SEQUENCE[:30]
    assert len(system.prefill.prefills) == len(system.prefill.handoffs) == 1
    system.decode.admission_gate.set()


async def test_a_lease_that_has_ended_costs_a_prefill_and_is_nobodys_failure(
    system: Cluster,
) -> None:
    """Losing decode is the one failure that the request may have; a second would end it."""
    system.decode.round_gate.clear()
    system.prefill.renew_gate.clear()  # or the router would hear of the end before it needs the lease
    call = system.stub.Generate(generate_request(stop=STOP))
    received = [await anext(aiter(call))]
    await system.prefill.seen.until(lambda: bool(system.prefill.renewed))
    await system.decode.seen.until(lambda: bool(system.decode.admits))
    system.prefill.leases.clear()
    system.decode.break_stream()
    system.decode.round_gate.set()
    received += await collect(call)
    assert tokens_of(received) == SEQUENCE[:30]
    assert [len(system.prefill.prefills), len(system.prefill.handoffs)] == [2, 1]
    assert received[-1].completion.route.replacements == 2
    system.prefill.renew_gate.set()


async def test_a_handoff_from_a_lease_that_fails_is_not_tried_from_there_again(
    tmp_path: Path,
) -> None:
    config = router_config(write_tokenizer(tmp_path))
    decodes = [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
    async with cluster(config, [prefill_with_leases()], decodes) as system:
        responses, received = await begun(system)
        system.prefill.failures = [TransferFailed("the wire was cut")]
        system.decode.break_stream()
        received += [response async for response in responses]
        assert tokens_of(received) == SEQUENCE[:30]
        assert [len(system.prefill.prefills), len(system.prefill.handoffs)] == [2, 1]
        # The state that was computed anew is kept instead of the old one.
        await system.prefill.seen.until(lambda: len(system.prefill.released) == 2)
        assert system.prefill.released == ["reservation-1", "reservation-2"]


async def test_a_restarted_prefill_worker_is_not_asked_for_what_it_cannot_have(
    system: Cluster,
) -> None:
    responses, received = await begun(system)
    system.prefill.generation = "prefill-2"
    await workers_seen(system.stub, lambda workers: workers[0].generation == "prefill-2")
    system.decode.break_stream()
    system.decode.round_gate.set()
    received += [response async for response in responses]
    assert tokens_of(received) == SEQUENCE[:30]
    assert [len(system.prefill.prefills), len(system.prefill.handoffs)] == [2, 0]


async def test_leases_are_renewed_together_while_their_requests_run_and_no_longer(
    system: Cluster,
) -> None:
    system.decodes[1].prefix = "another"
    for decode in system.decodes:
        decode.round_gate.clear()
    calls = [system.stub.Generate(generate_request(stop=STOP)) for _ in range(3)]
    await system.prefill.seen.until(lambda: len(system.prefill.renewed) >= 9)
    assert len(set(system.prefill.renewed)) == 3
    for decode in system.decodes:
        decode.round_gate.set()
    for call in calls:
        assert tokens_of(await collect(call)) == SEQUENCE[:30]
    await system.prefill.seen.until(lambda: len(system.prefill.released) == 3)
    for _ in range(round(WAIT_S / RENEWAL_S)):
        num_renewed = len(system.prefill.renewed)
        await asyncio.sleep(RENEWAL_S * RENEWALS_PER_LEASE)
        if len(system.prefill.renewed) == num_renewed:
            return
    raise AssertionError("leases that were released are renewed for ever")
