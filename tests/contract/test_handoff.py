"""State from a prefill worker to a decode worker over real sockets, with an engine that writes recognisable rows."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest

from common.engine.request import Request
from common.transfer.config import TransferConfig
from common.transfer.digest import rows_bytes
from common.transfer.plan import final_rows
from services.prefill.config import HandoffConfig
from services.prefill.handoff import Handoff
from services.prefill.loop import PromptFinished
from tests.support.fake_engine import FakeEngine, loaded, token_after, token_at
from tests.support.figures import figure
from tests.support.handoff_cluster import Cluster, a_context, cluster
from tests.support.small_cache import small_layout
from tests.support.transfer_engines import engine_params, transfer_config
from tests.support.waiting import WAIT_S


def engines(prefill_drafts: int = 5, decode_drafts: int = 7) -> tuple[FakeEngine, FakeEngine]:
    layout = small_layout()
    prefill = FakeEngine(layout, draft_length=prefill_drafts, num_pages=24)
    return prefill, FakeEngine(layout, draft_length=decode_drafts, num_pages=32, num_slots=6)


@pytest.fixture(params=engine_params("grpc", "nixl", "nixl-tcp"))
def transfer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TransferConfig:
    return transfer_config(request.param, monkeypatch)


async def adopted(it: Cluster, sink: FakeEngine, count: int = 1) -> Request:
    """The last of `count` requests that the decode engine took over."""
    await it.until(lambda: len(sink.adopted) == count)
    return sink.adopted[-1]


def sent_bytes(it: Cluster, transfer: TransferConfig) -> float:
    registry = it.prefill.metrics.registry
    return figure(registry, "dspark_kv_transfer_bytes_total", engine=str(transfer.engine))


@pytest.mark.parametrize(
    ("prefill_drafts", "decode_drafts"), [(5, 5), (1, 15), (15, 1), (7, 5), (0, 7), (7, 0)]
)
async def test_every_row_arrives_at_all_borders_and_with_other_rings_on_both_sides(
    transfer: TransferConfig, prefill_drafts: int, decode_drafts: int
) -> None:
    source, sink = engines(prefill_drafts, decode_drafts)
    async with cluster(loaded(source), loaded(sink), transfer=transfer) as it:
        stream = it.stream()
        for index, num_tokens in enumerate((1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 400)):
            context = a_context(num_tokens, request_id=f"r{num_tokens}", first=num_tokens)
            reserved = await it.reserve(context)
            await stream.admit(context, reserved)
            first, done = await it.hand_over(context, reserved)

            admitted = await stream.next("admitted")
            request = await adopted(it, sink, index + 1)
            assert admitted.first_token_id == first.token_id == token_at(request, num_tokens)
            assert not admitted.drafter_fallback
            assert request.tokens[: num_tokens + 1] == [*context.tokens, first.token_id]
            assert sink.wrong_rows == []
            assert done.transfer_engine == transfer.engine
            await stream.commit(context, 0, num_tokens + 1, finish=True)
            await stream.skip_to("finished")
        await it.require_clean()


async def test_the_first_token_does_not_wait_for_the_handoff(transfer: TransferConfig) -> None:
    source, sink = engines()
    async with cluster(loaded(source), loaded(sink), transfer=transfer) as it:
        context = a_context(200)
        reserved = await it.reserve(context)
        release = asyncio.Event()
        intake = cast(Any, it.decode.intake)
        complete = intake.complete

        async def held(*arguments: Any) -> Any:
            await release.wait()
            return await complete(*arguments)

        intake.complete = held
        call = it.start_prefill(context, reserved)
        assert (await call.read()).WhichOneof("event") == "first_token"
        release.set()
        assert (await call.read()).WhichOneof("event") == "handoff_done"


async def test_a_proposal_is_cut_to_what_the_decode_worker_verifies(
    transfer: TransferConfig,
) -> None:
    source, sink = engines(prefill_drafts=7, decode_drafts=5)
    async with cluster(loaded(source), loaded(sink), transfer=transfer) as it:
        context, stream = a_context(50), it.stream()
        reserved = await it.reserve(context)
        await stream.admit(context, reserved)
        await it.hand_over(context, reserved)
        await stream.next("admitted")
        request = await adopted(it, sink)
        assert request.drafter_valid_from == 0
        assert sink.num_drafts == [5]


async def test_drafter_rows_that_stay_behind_are_said_and_not_read(
    transfer: TransferConfig,
) -> None:
    source, sink = engines()
    handoff = HandoffConfig(sends_drafter_state=False)
    async with cluster(loaded(source), loaded(sink), handoff=handoff, transfer=transfer) as it:
        context, stream = a_context(150), it.stream()
        reserved = await it.reserve(context)
        await stream.admit(context, reserved)
        await it.hand_over(context, reserved)
        admitted = await stream.next("admitted")
        assert admitted.drafter_fallback == "the prefill worker sent no drafter state"
        request = await adopted(it, sink)
        assert request.drafter_valid_from == 150
        assert sink.wrong_rows == []


@pytest.mark.parametrize("admits_first", [True, False])
async def test_admit_may_come_before_or_after_the_handoff(
    transfer: TransferConfig, admits_first: bool
) -> None:
    source, sink = engines()
    async with cluster(loaded(source), loaded(sink), transfer=transfer) as it:
        context, stream = a_context(130), it.stream()
        reserved = await it.reserve(context)
        if admits_first:
            await stream.admit(context, reserved)
        await it.hand_over(context, reserved)
        if not admits_first:
            await stream.admit(context, reserved)
        await stream.next("admitted")
        verified = await stream.next("verified")
        assert (verified.round, verified.base, len(verified.token_ids)) == (1, 131, 2)


async def test_a_request_that_is_placed_again_is_computed_with_its_committed_tokens(
    transfer: TransferConfig,
) -> None:
    source, sink = engines()
    async with cluster(loaded(source), loaded(sink), transfer=transfer) as it:
        context, stream = a_context(140, num_committed=13, epoch=3), it.stream()
        reserved = await it.reserve(context)
        await stream.admit(context, reserved)
        first, _ = await it.hand_over(context, reserved)
        admitted = await stream.next("admitted")
        request = await adopted(it, sink)
        assert admitted.epoch == 3
        assert request.tokens[:141] == [*context.tokens, first.token_id]
        assert request.max_length == 127 + 32
        assert sink.wrong_rows == []


async def test_pages_that_close_travel_while_the_prompt_is_still_computed(
    transfer: TransferConfig,
) -> None:
    source, sink = engines()
    async with cluster(loaded(source), loaded(sink), transfer=transfer) as it:
        context = a_context(400)
        reserved = await it.reserve(context)
        source.permits = threading.Semaphore(0)
        call = it.start_prefill(context, reserved)
        source.permits.release(
            5
        )  # 320 of 400 tokens: two whole pages, and of the last window 48 rows
        final = final_rows(source.pool.layout, 400, 320, has_drafter_state=True)
        early = rows_bytes(source.memory, final)
        assert early > 2 * (2 * 2 * 32 * 16 + 16)  # csa and index have two layers, hca one
        await it.until(lambda: sent_bytes(it, transfer) == early)
        source.permits.release(100)
        events = [event async for event in call]
        assert events[-1].handoff_done.num_bytes > early


@pytest.mark.parametrize(
    "transfer", engine_params("grpc", "nixl", "nixl-tcp", "mooncake"), indirect=True
)
async def test_many_handoffs_at_once_do_not_mix(
    transfer: TransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None ends before all have begun."""
    layout, number = small_layout(), 32
    finish, waiting, have_begun = Handoff.finish, list[Handoff](), asyncio.Event()

    async def finish_together(handoff: Handoff, finished: PromptFinished) -> None:
        waiting.append(handoff)
        if len(waiting) == number:
            registry = it.prefill.metrics.registry
            assert figure(registry, "dspark_kv_handoffs_in_progress") == number
            have_begun.set()
        await asyncio.wait_for(have_begun.wait(), WAIT_S)
        await finish(handoff, finished)

    monkeypatch.setattr(Handoff, "finish", finish_together)
    source = FakeEngine(layout, draft_length=5, num_pages=100, num_slots=number)
    sink = FakeEngine(layout, draft_length=7, num_pages=140, num_slots=number)
    async with cluster(loaded(source), loaded(sink), transfer=transfer) as it:
        stream = it.stream()

        async def one(index: int) -> None:
            context = a_context(20 + 9 * index, request_id=f"r{index}", first=index + 1)
            reserved = await it.reserve(context)
            await stream.admit(context, reserved)
            await it.hand_over(context, reserved)

        await asyncio.gather(*(one(index) for index in range(number)))
        await adopted(it, sink, number)
        assert sink.wrong_rows == []


async def test_the_first_token_is_told_while_the_proposal_behind_it_is_still_drafted() -> None:
    source, sink = engines()
    source.drafting_permits = threading.Semaphore(0)
    async with cluster(loaded(source), loaded(sink)) as it:
        context = a_context(50)
        reserved = await it.reserve(context)
        call = it.start_prefill(context, reserved)
        told = await anext(aiter(call))
        source.drafting_permits.release()
        assert told.first_token.token_id == token_after(context.tokens[0], 50)
        assert [event.WhichOneof("event") async for event in call] == ["handoff_done"]
        compute_s, queue_s = told.first_token.compute_s, told.first_token.queue_s
        assert min(compute_s, queue_s) >= 0.0
        registry = it.prefill.metrics.registry
        assert figure(registry, "dspark_queue_duration_seconds_count") == 1


async def test_a_mesh_tells_the_first_token_once_when_its_step_has_ended() -> None:
    source, sink = engines()
    source.tells_first_tokens = False
    async with cluster(loaded(source), loaded(sink)) as it:
        context = a_context(50)
        first, _ = await it.hand_over(context, await it.reserve(context))
        assert first.token_id == token_after(context.tokens[0], 50)
        registry = it.prefill.metrics.registry
        assert figure(registry, "dspark_queue_duration_seconds_count") == 1
