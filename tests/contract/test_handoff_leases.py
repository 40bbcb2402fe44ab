"""State that a prefill worker keeps goes to further decode workers without being computed again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import pytest

from common.errors import InvalidRequest, LeaseEnded, ServingError
from common.rpc import convert
from common.rpc.status import error_of_call
from common.transfer.engine import TransferEngine
from common.transfer.memory import PoolMemory
from common.types import RequestContext, RequestId
from dspark.v1 import prefill_service_pb2
from tests.support import engines
from tests.support.engines import HeldEngine
from tests.support.fake_engine import FakeEngine, loaded, token_after
from tests.support.figures import figure
from tests.support.handoff_cluster import Cluster, a_context, cluster
from tests.support.small_cache import small_layout
from tests.support.waiting import WAIT_S

NUM_TOKENS = 200
NUM_PAGES = 2


@dataclass(kw_only=True)
class Kept:
    """A finished prefill under a lease, and a second pair of workers whose decode worker has nothing of it."""

    first: Cluster
    other: Cluster
    sink: FakeEngine
    """Of the other decode worker."""
    held: HeldEngine
    first_token: int
    lease_id: str

    def later(self, num_committed: int, *, epoch: int = 1) -> RequestContext:
        """The request when so many tokens were committed."""
        context = a_context(NUM_TOKENS, epoch=epoch)
        positions = range(NUM_TOKENS, NUM_TOKENS + num_committed)
        context.committed.extend(token_after(context.prompt[0], p) for p in positions)
        return context

    def ask(self, context: RequestContext, reserved: Any, *, lease_id: str | None = None) -> Any:
        request = prefill_service_pb2.HandOffRequest(
            lease_id=self.lease_id if lease_id is None else lease_id,
            context=convert.context_to_pb(context),
            ticket=prefill_service_pb2.DecodeTicket(
                decode_address=self.other.decode_address,
                reservation_id=reserved.reservation_id,
                capability=reserved.capability,
            ),
        )
        return self.first.prefill_stub.HandOff(request, timeout=WAIT_S)

    async def go_on(self, context: RequestContext) -> Any:
        """Hand the state to the other decode worker; its Admitted."""
        stream = self.other.stream()
        reserved = await self.other.reserve(context)
        await stream.admit(context, reserved)
        done = (await self.ask(context, reserved)).done
        assert done.lease_id == self.lease_id
        admitted = await stream.next("admitted")
        await self.first.until(lambda: bool(self.sink.adopted))
        assert self.sink.wrong_rows == []
        verified = await stream.next("verified")
        assert verified.base == len(context.tokens) + admitted.HasField("first_token_id")
        await stream.abort(context)
        await stream.skip_to("finished")
        return admitted


@contextlib.asynccontextmanager
async def kept(engine: str = "grpc") -> AsyncIterator[Kept]:
    layout = small_layout()
    source, sink = FakeEngine(layout), FakeEngine(layout, draft_length=7)
    wrapped: list[HeldEngine] = []

    def wrap(inner: TransferEngine, memory: PoolMemory) -> HeldEngine:
        wrapped.append(HeldEngine(inner))
        return wrapped[-1]

    with engines.using(engine, wrap):
        async with (
            cluster(loaded(source), loaded(FakeEngine(layout))) as first,
            cluster(loaded(FakeEngine(layout)), loaded(sink)) as other,
        ):
            context, stream = a_context(NUM_TOKENS), first.stream()
            reserved = await first.reserve(context)
            await stream.admit(context, reserved)
            token, done = await first.hand_over(context, reserved)
            stream.call.cancel()  # its decode worker is lost
            yield Kept(
                first=first,
                other=other,
                sink=sink,
                held=wrapped[0],
                first_token=token.token_id,
                lease_id=done.lease_id,
            )
            await first.require_clean()
            await other.require_clean()


async def refusal(call: Any) -> ServingError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_of_call(caught.value, peer="prefill")


async def release(it: Kept, context: RequestContext, reserved: Any) -> None:
    stream = it.other.stream()
    await stream.abort(context, reserved.reservation_id)
    await stream.next("finished")


@pytest.mark.parametrize("engine", engines.ALL)
@pytest.mark.parametrize("num_committed", [2, 13])
async def test_a_context_that_went_on_is_caught_up_with_by_its_new_decode_worker(
    engine: str, num_committed: int
) -> None:
    async with kept(engine) as it:
        context = it.later(num_committed)
        admitted = await it.go_on(context)
        assert not admitted.HasField("first_token_id")
        (request,) = it.sink.adopted
        assert request.tokens[: context.length] == context.tokens
        # Drafts behind the first token say nothing about what follows a later one.
        assert it.sink.num_drafts == [0]
        assert request.drafter_valid_from == 0
        assert it.first.prefill.counts["lease_handoffs"] == 1


async def test_before_anything_was_committed_the_first_token_and_its_drafts_come_along() -> None:
    async with kept() as it:
        admitted = await it.go_on(it.later(0))
        assert admitted.first_token_id == it.first_token
        assert it.sink.num_drafts == [5]


async def test_when_the_first_token_was_committed_its_drafts_are_still_good() -> None:
    async with kept() as it:
        admitted = await it.go_on(it.later(1))
        assert not admitted.HasField("first_token_id")
        assert it.sink.num_drafts == [5]


async def test_drafts_of_another_first_token_are_left_out() -> None:
    async with kept() as it:
        context = it.later(1)
        context.committed[0] += 1
        await it.go_on(context)
        assert it.sink.num_drafts == [0]


async def test_the_same_state_can_be_taken_again_and_again() -> None:
    async with kept() as it:
        for epoch in range(1, 4):
            await it.go_on(it.later(2 * epoch, epoch=epoch))
        registry = it.first.prefill.metrics.registry
        assert figure(registry, "dspark_kv_leases") == 1
        it.first.prefill.release_lease(it.lease_id)
        assert figure(registry, "dspark_kv_leases") == 0


async def test_a_context_that_does_not_begin_with_the_leases_tokens_is_refused() -> None:
    async with kept() as it:
        wrong = a_context(NUM_TOKENS + 3, epoch=1, num_committed=3, first=12)
        reserved = await it.other.reserve(wrong)
        error = await refusal(it.ask(wrong, reserved))
        assert isinstance(error, InvalidRequest)
        assert "does not begin with the 200 tokens of the lease" in error.message
        await release(it, wrong, reserved)


async def test_a_lease_that_is_gone_is_said_by_name() -> None:
    async with kept() as it:
        context = it.later(3)
        reserved = await it.other.reserve(context)
        assert isinstance(await refusal(it.ask(context, reserved, lease_id="?")), LeaseEnded)
        it.first.prefill.release_lease(it.lease_id)
        assert isinstance(await refusal(it.ask(context, reserved)), LeaseEnded)
        await release(it, context, reserved)


async def test_a_draining_worker_hands_over_what_it_has() -> None:
    async with kept() as it:
        it.first.prefill.is_draining = True
        await it.go_on(it.later(3))


async def info_of(it: Kept) -> Any:
    request = prefill_service_pb2.PrefillServiceGetWorkerInfoRequest()
    return (await it.first.prefill_stub.GetWorkerInfo(request, timeout=WAIT_S)).info


async def test_a_draining_worker_is_kept_for_its_leases_and_for_who_still_reads_them() -> None:
    async with kept() as it:
        context, prefill = it.later(3), it.first.prefill
        assert not (await info_of(it)).safe_to_delete
        prefill.begin_draining()
        idle = asyncio.create_task(prefill.wait_idle())
        info = await info_of(it)
        assert (info.num_leases, info.running_requests, info.safe_to_delete) == (1, 0, False)
        reserved = await it.other.reserve(context)
        it.held.hold()
        call = it.ask(context, reserved)
        await it.held.is_half_way.wait()
        prefill.release_lease(it.lease_id)
        info = await info_of(it)
        assert (info.num_leases, info.running_requests, info.safe_to_delete) == (0, 1, False)
        assert not idle.done()
        it.held.release()
        await call
        await asyncio.wait_for(idle, WAIT_S)
        assert (await info_of(it)).safe_to_delete
        await release(it, context, reserved)


async def test_a_draining_worker_does_not_wait_for_leases_that_nobody_renews() -> None:
    async with kept() as it:
        prefill = it.first.prefill
        prefill.begin_draining()
        idle = asyncio.create_task(prefill.wait_idle())
        assert not prefill.is_safe_to_delete
        prefill.leases._leases[it.lease_id].expires_at = 0.0
        prefill.expire()
        await asyncio.wait_for(idle, WAIT_S)
        assert prefill.is_safe_to_delete


async def test_a_reader_that_is_given_up_leaves_the_lease_to_others() -> None:
    async with kept() as it:
        context = it.later(3)
        reserved = await it.other.reserve(context)
        it.held.hold()
        call = it.ask(context, reserved)
        await it.held.is_half_way.wait()
        call.cancel()
        await it.other.until(lambda: len(it.other.decode.reservations) == 0)
        it.held.release()
        await it.go_on(it.later(3, epoch=2))


@pytest.mark.parametrize("engine", engines.ALL)
async def test_a_lease_that_ends_while_it_is_read_is_read_to_its_end(engine: str) -> None:
    async with kept(engine) as it:
        context, room = it.later(5), it.first.prefill.room
        stream, reserved = it.other.stream(), await it.other.reserve(context)
        await stream.admit(context, reserved)
        it.held.hold()
        call = it.ask(context, reserved)
        await it.held.is_half_way.wait()
        it.first.prefill.leases._leases[it.lease_id].expires_at = 0.0
        it.first.prefill.expire()
        assert len(it.first.prefill.leases) == 0
        # Whoever comes now must not get the rows that are still to be sent.
        assert room.memory.num_free_slots == room.memory.num_slots - 1
        newcomer = a_context(NUM_TOKENS, request_id="newcomer", first=99)
        await it.first.hand_over(newcomer, await it.first.reserve(newcomer))
        it.held.release()
        await call
        await stream.next("admitted")
        await stream.skip_to("verified")
        assert it.sink.wrong_rows == []
        await stream.abort(context)
        await stream.skip_to("finished")
        await it.first.stream().abort(newcomer)
        await it.first.until(lambda: len(it.first.decode.reservations) == 0)


async def test_a_source_that_may_still_be_read_stays_when_its_lease_and_its_reader_have_ended() -> (
    None
):
    async with kept("direct") as it:
        context, prefill = it.later(5), it.first.prefill
        reserved = await it.other.reserve(context)
        it.held.hold(num_denials=1)
        call = it.ask(context, reserved)
        await it.held.is_half_way.wait()
        prefill.release_lease(it.lease_id)
        call.cancel()
        await it.first.until(lambda: prefill.quarantine.num_pages == NUM_PAGES)
        assert prefill.room.memory.num_free_slots == prefill.room.memory.num_slots - 1
        prefill.begin_draining()
        idle = asyncio.create_task(prefill.wait_idle())
        info = await info_of(it)
        assert (info.num_leases, info.running_requests, info.safe_to_delete) == (0, 0, False)
        await prefill.quarantine.ask_all()
        await asyncio.wait_for(idle, WAIT_S)
        assert prefill.is_safe_to_delete
        assert prefill.room.memory.num_free_slots == prefill.room.memory.num_slots
        it.held.release()
        await release_if_there(it, context, reserved)


async def release_if_there(it: Kept, context: RequestContext, reserved: Any) -> None:
    """The end of the hand-off may have ended the reservation already."""
    stream = it.other.stream()
    await stream.abort(context, reserved.reservation_id)
    await it.other.until(lambda: len(it.other.decode.reservations) == 0)


async def test_two_requests_read_the_same_state_at_the_same_time() -> None:
    async with kept() as it:
        contexts = [it.later(2), replace(it.later(5), request_id=RequestId("another"))]
        streams = [it.other.stream() for _ in contexts]
        reserved = [await it.other.reserve(context) for context in contexts]
        for stream, context, room in zip(streams, contexts, reserved, strict=True):
            await stream.admit(context, room)
        it.held.hold()
        first = it.ask(contexts[0], reserved[0])
        await it.held.is_half_way.wait()
        # The second begins and ends while the first stands still.
        await it.ask(contexts[1], reserved[1])
        await streams[1].next("admitted")
        (lease,) = it.first.prefill.leases._leases.values()
        assert lease.num_readers == 1 and not first.done()
        it.held.release()
        await first
        await streams[0].next("admitted")
        assert lease.num_readers == 0
        for stream, context in zip(streams, contexts, strict=True):
            await stream.skip_to("verified")
            await stream.abort(context)
            await stream.skip_to("finished")
        assert len(it.sink.adopted) == 2
        assert it.sink.wrong_rows == []
