"""Where a router places requests when not every prefill worker reaches every decode worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ContractMismatch, ServingError, TransferFailed
from dspark.v1 import inference_service_pb2 as pb
from services.router import WorkerConfig, introductions
from services.router.leases import RENEWALS_PER_LEASE
from tests.support.chat_tokenizer import write_tokenizer
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.router_cluster import (
    SEQUENCE,
    STOP,
    Cluster,
    cluster,
    collect,
    error_of,
    generate_request,
    router_config,
    tokens_of,
    workers_seen,
)
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introductions, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(introductions, "LONGEST_RETRY_S", 0.01)


def prefill_worker() -> FakePrefill:
    """Its leases are renewed so often that a router which has heard of one is soon known to have."""
    prefill = FakePrefill(SEQUENCE)
    prefill.lease_s = RENEWALS_PER_LEASE * 0.05
    return prefill


async def loses_sight_of(it: Cluster, number: int, *, prefill: int = 0) -> None:
    """A prefill worker does not reach a decode worker any more, and the router knows."""
    worker, address = it.prefills[prefill], it.decode_addresses[number]
    worker.unreachable.add(address)
    num_before = len(worker.connects)
    it.decodes[number].generation += "+"  # another process, which nobody has met

    def has_tried_twice() -> bool:
        """The second try follows what the router has made of the first."""
        return [each.decode_address for each in worker.connects[num_before:]].count(address) >= 2

    await worker.seen.until(has_tried_twice)


async def route_of_one_more(it: Cluster) -> pb.Route:
    received = await collect(it.stub.Generate(generate_request(stop=STOP)))
    assert tokens_of(received) == SEQUENCE[:30]
    return received[-1].completion.route


async def error_of_one_more(it: Cluster) -> ServingError:
    return await error_of(it.stub.Generate(generate_request(stop=STOP)))


async def begun(it: Cluster) -> tuple[AsyncIterator[pb.GenerateResponse], list[int]]:
    """A request on the first decode worker, which says nothing more, and a lease on the first prefill worker."""
    responses = aiter(it.stub.Generate(generate_request(stop=STOP)))
    received = [await anext(responses), await anext(responses)]
    it.decode.round_gate.clear()
    await it.prefill.seen.until(lambda: bool(it.prefill.renewed))
    return responses, tokens_of(received)


async def leave(it: Cluster) -> None:
    """The first decode worker takes nothing any more, and what it has is lost."""
    it.decode.draining = True
    address = it.decode_addresses[0]
    await workers_seen(
        it.stub,
        lambda workers: any(
            w.address == address and w.state == pb.WORKER_STATE_DRAINING for w in workers
        ),
    )
    it.decode.break_stream()


async def test_one_request_finds_out_for_all_that_two_workers_do_not_reach_each_other(
    tmp_path: Path,
) -> None:
    prefill, decodes = FakePrefill(SEQUENCE), [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
    async with cluster(router_config(write_tokenizer(tmp_path)), [prefill], decodes) as it:
        await prefill.seen.until(lambda: len(prefill.connects) == 2)
        assert (await route_of_one_more(it)).replacements == 0
        prefill.unreachable = {it.decode_addresses[0]}
        assert (await route_of_one_more(it)).replacements == 1, "nobody knew"
        # The second try follows what the router has made of the first.
        await prefill.seen.until(lambda: len(prefill.connects) == 4)
        assert (await route_of_one_more(it)).replacements == 0
        assert len(decodes[0].admits) == 2
        prefill.unreachable.clear()
        async with asyncio.timeout(WAIT_S):
            while len(decodes[0].admits) == 2:
                assert (await route_of_one_more(it)).replacements == 0


async def test_a_request_is_placed_on_two_workers_that_have_met(tmp_path: Path) -> None:
    """Each prefill worker reaches another decode worker; by load alone the two that fail would come first."""
    prefills = [FakePrefill(SEQUENCE), FakePrefill(SEQUENCE)]
    decodes = [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
    async with cluster(router_config(write_tokenizer(tmp_path)), prefills, decodes) as it:
        for prefill, address in zip(prefills, it.decode_addresses, strict=True):
            await prefill.seen.until(lambda p=prefill: len(p.connects) == 2)  # type: ignore[misc]
            prefill.unreachable = {address}
            prefill.generation = "prefill-2"  # another process, which has met nobody
            await prefill.seen.until(lambda p=prefill: len(p.connects) >= 5)  # type: ignore[misc]
        for _ in range(4):
            assert (await route_of_one_more(it)).replacements == 0


async def test_a_request_that_does_not_survive_tells_the_others_all_the_same(
    tmp_path: Path,
) -> None:
    config = replace(
        router_config(write_tokenizer(tmp_path)),
        workers=WorkerConfig(poll_period_s=0.05, poll_timeout_s=WAIT_S, max_attempts=1),
    )
    prefill, decodes = prefill_worker(), [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
    async with cluster(config, [prefill], decodes) as it:
        await prefill.seen.until(lambda: len(prefill.connects) == 2)
        prefill.unreachable = {it.decode_addresses[0]}
        assert (await error_of_one_more(it)).reason == "KV_TRANSFER_FAILED"
        await prefill.seen.until(lambda: len(prefill.connects) >= 4)
        assert (await route_of_one_more(it)).replacements == 0
        assert len(decodes[1].admits) == 1


async def test_two_workers_that_do_not_match_are_introduced_again_and_then_passed_by(
    tmp_path: Path,
) -> None:
    prefill, decodes = prefill_worker(), [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
    prefill.why_unreachable = ContractMismatch("dtype is float32 here and bfloat16 there")
    async with cluster(router_config(write_tokenizer(tmp_path)), [prefill], decodes) as it:
        await prefill.seen.until(lambda: len(prefill.connects) == 2)
        prefill.unreachable = {it.decode_addresses[0]}
        assert (await route_of_one_more(it)).replacements == 1, "nobody knew"
        await prefill.seen.until(lambda: len(prefill.connects) >= 4)
        assert (await route_of_one_more(it)).replacements == 0
        assert len(decodes[0].admits) == 1


async def test_a_decode_worker_that_refuses_the_model_leaves_the_request_to_others(
    tmp_path: Path,
) -> None:
    mismatch = ContractMismatch("model_fingerprint is a at decode but b at the router")
    prefill, decodes = prefill_worker(), [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
    async with cluster(router_config(write_tokenizer(tmp_path)), [prefill], decodes) as it:
        decodes[0].refusals = [mismatch]
        assert (await route_of_one_more(it)).replacements == 0
        assert (len(decodes[0].admits), len(decodes[1].admits)) == (0, 1)
        decodes[0].refusals, decodes[1].refusals = [mismatch], [mismatch]
        assert (await error_of_one_more(it)).reason == "CONTRACT_MISMATCH"


async def test_a_request_that_nobody_can_bring_anywhere_is_tried_all_the_same(
    tmp_path: Path,
) -> None:
    """What the last introduction said may not be true any more."""
    prefill, decode = prefill_worker(), FakeDecode(SEQUENCE)
    async with cluster(router_config(write_tokenizer(tmp_path)), [prefill], [decode]) as it:
        await loses_sight_of(it, 0)
        assert (await error_of_one_more(it)).reason == "KV_TRANSFER_FAILED"
        prefill.refuses_to_connect = TransferFailed("not yet")
        prefill.unreachable.clear()
        assert (await route_of_one_more(it)).replacements == 0


async def test_a_decode_worker_is_as_good_as_another_when_one_prefill_worker_reaches_it(
    tmp_path: Path,
) -> None:
    prefills = [prefill_worker(), prefill_worker()]
    decodes = [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
    async with cluster(router_config(write_tokenizer(tmp_path)), prefills, decodes) as it:
        await loses_sight_of(it, 0)
        assert (await route_of_one_more(it)).replacements == 0
        assert [len(prefill.prefills) for prefill in prefills] == [0, 1]
        assert [len(decode.admits) for decode in decodes] == [1, 0]


async def test_a_way_that_failed_this_request_comes_after_one_that_an_introduction_found_closed(
    tmp_path: Path,
) -> None:
    prefills, decode = [prefill_worker(), prefill_worker()], FakeDecode(SEQUENCE)
    async with cluster(router_config(write_tokenizer(tmp_path)), prefills, [decode]) as it:
        await loses_sight_of(it, 0, prefill=1)
        prefills[1].refuses_to_connect = TransferFailed("no bytes arrived")
        prefills[1].unreachable.clear()
        prefills[0].failures = [TransferFailed("the wire was cut")]
        assert (await route_of_one_more(it)).replacements == 1
        assert [len(prefill.prefills) for prefill in prefills] == [1, 1]


async def test_a_decode_worker_that_computes_prompts_need_not_be_reached(tmp_path: Path) -> None:
    prefill, decodes = prefill_worker(), [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
    decodes[0].computes_prompt = True
    async with cluster(router_config(write_tokenizer(tmp_path)), [prefill], decodes) as it:
        await loses_sight_of(it, 0)
        assert (await route_of_one_more(it)).replacements == 0
        assert (len(decodes[0].admits), len(decodes[1].admits)) == (1, 0)


async def test_leased_state_goes_to_a_decode_worker_that_its_prefill_worker_reaches(
    tmp_path: Path,
) -> None:
    """By load alone it would be the second; another prefill worker reaches that one."""
    prefills = [prefill_worker(), prefill_worker()]
    decodes = [FakeDecode(SEQUENCE) for _ in range(3)]
    async with cluster(router_config(write_tokenizer(tmp_path)), prefills, decodes) as it:
        responses, tokens = await begun(it)
        await loses_sight_of(it, 1)
        await leave(it)
        tokens += tokens_of([response async for response in responses])
        assert tokens == SEQUENCE[:30]
        assert (len(prefills[0].handoffs), len(prefills[1].prefills)) == (1, 0)
        assert [len(decode.admits) for decode in decodes] == [1, 0, 1]


@pytest.mark.parametrize("another_reaches", [True, False])
async def test_state_whose_keeper_reaches_no_decode_worker_is_computed_by_one_that_does(
    tmp_path: Path, another_reaches: bool
) -> None:
    prefills = [prefill_worker(), prefill_worker()]
    decodes = [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
    async with cluster(router_config(write_tokenizer(tmp_path)), prefills, decodes) as it:
        responses, tokens = await begun(it)
        await loses_sight_of(it, 1)
        if not another_reaches:
            await loses_sight_of(it, 1, prefill=1)
            for prefill in prefills:  # true for introductions, but not for what is handed over
                prefill.refuses_to_connect = TransferFailed("no bytes arrived")
                prefill.unreachable.clear()
        await leave(it)
        tokens += tokens_of([response async for response in responses])
        assert tokens == SEQUENCE[:30]
        num_computed = 1 if another_reaches else 0
        assert len(prefills[1].prefills) == num_computed
        assert len(prefills[0].handoffs) == 1 - num_computed
        assert len(decodes[1].admits) == 1
