"""What waits and runs on workers, as their metrics say while it does. The engine takes a step only when it is let."""

from __future__ import annotations

import asyncio
import threading

import grpc.aio
import pytest

from dspark.v1 import decode_service_pb2
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.figures import figure
from tests.support.handoff_cluster import Cluster, a_context, cluster
from tests.support.small_cache import small_layout
from tests.support.waiting import until

NUM_TOKENS = 300
CHUNK = 128


@pytest.fixture
def gate() -> threading.Semaphore:
    return threading.Semaphore(0)


def of_prefill(it: Cluster, name: str, **labels: str) -> float:
    return figure(it.prefill.metrics.registry, f"dspark_{name}", **labels)


def of_decode(it: Cluster, name: str, **labels: str) -> float:
    return figure(it.decode.metrics.registry, f"dspark_{name}", **labels)


async def test_a_request_is_seen_on_its_way_through_both_workers(gate: threading.Semaphore) -> None:
    source, sink = FakeEngine(small_layout(), chunk=CHUNK), FakeEngine(small_layout())
    source.permits = gate
    async with cluster(loaded(source), loaded(sink)) as it:
        context = a_context(NUM_TOKENS)
        reserved = await it.reserve(context)
        assert of_decode(it, "reservations", state="reserved") == 1
        assert of_decode(it, "queue_requests") == 1
        assert of_decode(it, "running_requests") == 0
        assert of_decode(it, "request_slots", state="used") == 1
        assert of_decode(it, "kv_cache_used_tokens") >= NUM_TOKENS

        prefilling = asyncio.create_task(it.hand_over(context, reserved))
        await until(lambda: source.num_gated == 1)
        assert of_prefill(it, "running_requests") == 1
        assert of_prefill(it, "queue_uncached_tokens") == NUM_TOKENS
        assert of_prefill(it, "kv_handoffs_in_progress") == 1
        assert of_prefill(it, "engine_busy_seconds") > 0
        assert of_prefill(it, "prompt_tokens_computed_total") == 0
        await until(lambda: of_decode(it, "kv_handoffs_in_progress") == 1)

        gate.release()
        await until(lambda: of_prefill(it, "queue_uncached_tokens") == NUM_TOKENS - CHUNK)
        # Steps are counted after their results are delivered.
        await until(lambda: of_prefill(it, "prompt_tokens_computed_total") == CHUNK)
        source.permits = None
        gate.release(NUM_TOKENS)
        await prefilling
        assert of_decode(it, "reservations", state="ready") == 1
        assert of_prefill(it, "kv_leases") == 1
        assert of_prefill(it, "running_requests") == of_prefill(it, "queue_uncached_tokens") == 0

        stream = it.stream()
        await stream.admit(context, reserved)
        assert (
            of_decode(it, "running_requests") == of_decode(it, "reservations", state="running") == 1
        )
        assert of_decode(it, "queue_requests") == 0
        await stream.skip_to("verified")
        await stream.abort(context, reserved.reservation_id)
        await stream.skip_to("finished")
        await it.require_clean()
        for worker in (it.prefill, it.decode):
            registry = worker.metrics.registry
            for name in ("running_requests", "queue_requests", "kv_cache_used_tokens"):
                assert figure(registry, f"dspark_{name}") == 0
            assert figure(registry, "dspark_kv_handoffs_in_progress") == 0


async def test_a_prompt_that_decode_computes_is_uncached_until_its_first_token(
    gate: threading.Semaphore,
) -> None:
    engine = FakeEngine(small_layout(), chunk=CHUNK)
    engine.permits = gate
    async with cluster(
        loaded(FakeEngine(small_layout())), loaded(engine), computes_prompts=True
    ) as it:
        context = a_context(NUM_TOKENS)
        stream = it.stream()
        await stream.admit(context, await it.reserve(context))
        await until(lambda: engine.num_gated == 1)
        assert of_decode(it, "queue_uncached_tokens") == NUM_TOKENS
        gate.release(NUM_TOKENS)
        await stream.skip_to("verified")
        assert of_decode(it, "queue_uncached_tokens") == 0
        await until(lambda: of_decode(it, "prompt_tokens_computed_total") == NUM_TOKENS)
        # The prompt's own token is no verification.
        sampled = of_decode(it, "tokens_sampled_total")
        assert of_decode(it, "spec_accepted_length_sum") == sampled - 1


async def test_tokens_that_a_router_did_not_take_are_discarded() -> None:
    """Decode runs ahead of its router; an end gives up what was not committed."""
    source, sink = FakeEngine(small_layout()), FakeEngine(small_layout(), max_uncommitted_rounds=2)
    async with cluster(loaded(source), loaded(sink)) as it:
        context = a_context(NUM_TOKENS)
        reserved = await it.reserve(context)
        await it.hand_over(context, reserved)
        stream = it.stream()
        await stream.admit(context, reserved)
        await stream.skip_to("verified")
        second = await stream.skip_to("verified")
        num_offered = second.base + len(second.token_ids) - (NUM_TOKENS + 1)
        await stream.send(
            commit=decode_service_pb2.Commit(
                request_id=context.request_id,
                epoch=context.epoch,
                round=2,
                length=NUM_TOKENS + 2,
                finish=True,
            )
        )
        await stream.skip_to("finished")
        assert of_decode(it, "tokens_sampled_total") == num_offered
        assert of_decode(it, "tokens_discarded_total") == num_offered - 1


async def test_leases_are_counted_by_how_they_end() -> None:
    source, sink = FakeEngine(small_layout(), num_slots=1), FakeEngine(small_layout())
    async with cluster(loaded(source), loaded(sink)) as it:
        ended = {
            reason: lambda reason=reason: of_prefill(it, "kv_leases_ended_total", reason=reason)
            for reason in ("released", "expired", "evicted")
        }
        for request_id in ("a", "b"):
            context = a_context(140, request_id=request_id)
            await it.hand_over(context, await it.reserve(context))
        assert ended["evicted"]() == 1
        (lease_id,) = it.prefill.leases._leases
        it.prefill.release_lease(lease_id)
        assert (ended["released"](), ended["expired"]()) == (1, 0)


async def test_a_message_with_a_wrong_secret_is_counted() -> None:
    async with cluster(
        loaded(FakeEngine(small_layout())), loaded(FakeEngine(small_layout()))
    ) as it:
        context = a_context(140)
        reserved = await it.reserve(context)
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in it.start_prefill(context, reserved, capability=b"0" * 32):
                pass
        assert of_decode(it, "kv_refusals_total", reason="capability_refused") > 0
