"""What the router does when a worker, a client or the clock gives out, over sockets, with scripted workers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from common.errors import (
    CapabilityRefused,
    CapacityExhausted,
    ContractMismatch,
    InvalidRequest,
    ServingError,
    TransferFailed,
)
from common.rpc.status import error_of_call
from dspark.v1 import decode_service_pb2, types_pb2
from dspark.v1 import inference_service_pb2 as pb
from services.router import QueueConfig, WorkerConfig, attempt
from tests.support.chat_tokenizer import write_tokenizer
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.router_cluster import (
    Cluster,
    cluster,
    collect,
    generate_request,
    router_config,
    tokens_of,
    workers_seen,
)
from tests.support.waiting import LOOK_S, WAIT_S

SEQUENCE = list(range(40, 140))
STOP = types_pb2.StopParams(max_tokens=30)
TIMES_S = (0.3, 3.0, 30.0)
"""Of requests that are to end in the middle: a busy machine may need more than the first to get them there."""


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[Cluster]:
    config = router_config(write_tokenizer(tmp_path))
    async with cluster(config, [FakePrefill(SEQUENCE)], [FakeDecode(SEQUENCE)]) as running:
        yield running


@pytest.fixture
async def pairs(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two workers of each role."""
    config = router_config(write_tokenizer(tmp_path))
    prefills = [FakePrefill(SEQUENCE), FakePrefill(SEQUENCE)]
    decodes = [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
    async with cluster(config, prefills, decodes) as running:
        yield running


@pytest.fixture
async def quick_pairs(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two workers of each role that are soon given up, and requests that never give up."""
    config = replace(
        router_config(write_tokenizer(tmp_path)),
        workers=WorkerConfig(poll_period_s=0.05, poll_timeout_s=1.0, max_attempts=1000),
    )
    prefills = [FakePrefill(SEQUENCE), FakePrefill(SEQUENCE)]
    decodes = [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
    async with cluster(config, prefills, decodes) as running:
        yield running


def breaking_at_random(
    decode: FakeDecode, rng: random.Random
) -> Callable[[decode_service_pb2.DecodeEvent], list[decode_service_pb2.DecodeEvent]]:
    def mangle(event: decode_service_pb2.DecodeEvent) -> list[decode_service_pb2.DecodeEvent]:
        if rng.random() < 0.1:
            decode.break_stream()
            return []
        return [event]

    return mangle


async def error_of(
    call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse],
) -> ServingError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return error_of_call(caught.value, peer="router")


class TestCancel:
    """A client that goes leaves nothing behind, whatever phase its request is in."""

    async def test_while_queued(self, system: Cluster) -> None:
        system.decode.refusals = [CapacityExhausted("full")] * 1000
        call = system.stub.Generate(generate_request(stop=STOP))
        await system.decode.seen.until(lambda: len(system.decode.reserves) > 1)
        call.cancel()
        await until_idle(system)
        assert not system.decode.admits and not system.prefill.prefills
        system.decode.refusals = []

    async def test_while_reserving_gives_the_reservation_back(self, system: Cluster) -> None:
        system.decode.reserve_gate.clear()
        call = system.stub.Generate(generate_request(stop=STOP))
        await system.decode.seen.until(lambda: bool(system.decode.reserves))
        call.cancel()
        await until_idle(system)
        system.decode.reserve_gate.set()
        await system.decode.seen.until(lambda: bool(system.decode.aborts))
        assert system.decode.aborts[0].reservation_id == "reservation-1"
        assert not system.decode.admits and not system.prefill.prefills

    async def test_while_prefilling_ends_both_legs(self, system: Cluster) -> None:
        system.prefill.start_gate.clear()
        call = system.stub.Generate(generate_request(request_id="r", stop=STOP))
        await system.prefill.seen.until(lambda: bool(system.prefill.prefills))
        call.cancel()
        await system.prefill.seen.until(lambda: system.prefill.cancelled == ["r"])
        await system.decode.seen.until(
            lambda: [a.request_id for a in system.decode.aborts] == ["r"]
        )

    async def test_before_admission_ends_both_legs(self, system: Cluster) -> None:
        system.prefill.handoff_gate.clear()
        call = system.stub.Generate(generate_request(request_id="r", stop=STOP))
        await anext(aiter(call))
        call.cancel()
        await system.prefill.seen.until(lambda: system.prefill.cancelled == ["r"])
        await system.decode.seen.until(
            lambda: [a.request_id for a in system.decode.aborts] == ["r"]
        )

    async def test_after_admission_ends_decode_and_releases_the_lease(
        self, system: Cluster
    ) -> None:
        call = system.stub.Generate(generate_request(request_id="r", stop=STOP))
        responses = aiter(call)
        await anext(responses)
        await anext(responses)
        system.decode.round_gate.clear()
        call.cancel()
        await system.decode.seen.until(
            lambda: [a.request_id for a in system.decode.aborts] == ["r"]
        )
        await system.prefill.seen.until(lambda: system.prefill.released == ["reservation-1"])

    async def test_before_the_lease_was_heard_of_releases_it_all_the_same(
        self, system: Cluster
    ) -> None:
        """A request left while the hand-off's last message was on its way used to keep its room for a whole lease."""
        system.prefill.done_gate.clear()
        call = system.stub.Generate(generate_request(request_id="r", stop=STOP))
        responses = aiter(call)
        await anext(responses)
        await anext(responses)
        call.cancel()
        await system.prefill.seen.until(lambda: system.prefill.released == ["reservation-1"])


class TestDeadline:
    async def test_while_prefilling_ends_both_legs(self, system: Cluster) -> None:
        system.prefill.start_gate.clear()
        for time_s in TIMES_S:
            request = generate_request(request_id=f"r{time_s}", stop=STOP)
            error = await error_of(system.stub.Generate(request, timeout=time_s))
            assert error.kind.value == "deadline_exceeded"
            if system.prefill.prefills:
                break
        await system.prefill.seen.until(lambda: system.prefill.cancelled == [request.request_id])
        await system.decode.seen.until(
            lambda: request.request_id in {abort.request_id for abort in system.decode.aborts}
        )

    async def test_the_routers_own_bound_holds_without_a_clients(self, tmp_path: Path) -> None:
        stage = ""
        for time_s in TIMES_S:
            config = replace(router_config(write_tokenizer(tmp_path)), request_timeout_s=time_s)
            async with cluster(config, [FakePrefill(SEQUENCE)], [FakeDecode(SEQUENCE)]) as system:
                system.decode.round_gate.clear()
                error = await error_of(system.stub.Generate(generate_request(stop=STOP)))
                assert error.reason == "DEADLINE_EXCEEDED"
                stage = error.metadata["stage"]
                if stage == "decode":
                    await system.decode.seen.until(lambda d=system.decode: bool(d.aborts))  # type: ignore[misc]
                    break
        assert stage == "decode"


class TestReplacement:
    """A worker that fails costs time, never a token."""

    async def test_a_lost_decode_stream_loses_and_repeats_nothing(self, system: Cluster) -> None:
        system.decode.round_gate.clear()
        call = system.stub.Generate(generate_request(stop=STOP))
        responses = aiter(call)
        received = [await anext(responses)]
        system.decode.round_gate.set()
        received.append(await anext(responses))
        received.append(await anext(responses))
        system.decode.break_stream()
        received += [response async for response in responses]
        assert tokens_of(received) == SEQUENCE[:30]
        assert received[-1].completion.route.replacements == 1
        again = system.prefill.handoffs[0].context
        assert again.epoch == 1
        committed = list(again.committed_token_ids)
        assert committed == SEQUENCE[: len(committed)] and len(committed) >= 7

    async def test_another_decode_worker_takes_over(self, pairs: Cluster) -> None:
        pairs.decodes[0].round_gate.clear()
        call = pairs.stub.Generate(generate_request(stop=STOP))
        first = await anext(aiter(call))
        pairs.decodes[0].break_stream()
        received = [first, *await collect(call)]
        assert tokens_of(received) == SEQUENCE[:30]
        assert [a.epoch for a in pairs.decodes[1].admits] == [1]

    async def test_a_prefill_error_is_tried_on_the_other_worker(self, pairs: Cluster) -> None:
        pairs.prefills[0].failures = [TransferFailed("the wire was cut")]
        received = await collect(pairs.stub.Generate(generate_request(stop=STOP)))
        assert tokens_of(received) == SEQUENCE[:30]
        assert received[-1].completion.route.replacements == 1
        assert len(pairs.prefills[0].prefills) == len(pairs.prefills[1].prefills) == 1

    @pytest.mark.parametrize("num_prefills", [1, 2])
    async def test_a_decode_worker_that_prefill_cannot_reach_is_passed_by(
        self, tmp_path: Path, num_prefills: int
    ) -> None:
        """Only prefill was suspected, so that all attempts went to the same decode worker beside one that was well."""
        config = router_config(write_tokenizer(tmp_path))
        prefills = [FakePrefill(SEQUENCE) for _ in range(num_prefills)]
        decodes = [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
        async with cluster(config, prefills, decodes) as it:
            for prefill in prefills:
                prefill.unreachable = {it.decode_addresses[0]}
            received = await collect(it.stub.Generate(generate_request(stop=STOP)))
            assert tokens_of(received) == SEQUENCE[:30]
            assert received[-1].completion.route.replacements == 1
            assert len(decodes[1].admits) == 1

    async def test_no_pair_is_tried_again_before_every_worker_was_tried_with_others(
        self, pairs: Cluster
    ) -> None:
        for prefill, address in zip(pairs.prefills, pairs.decode_addresses, strict=True):
            prefill.unreachable = {address}
        received = await collect(pairs.stub.Generate(generate_request(stop=STOP)))
        assert tokens_of(received) == SEQUENCE[:30]
        assert received[-1].completion.route.replacements == 2

    async def test_workers_that_do_not_match_are_tried_with_others(self, pairs: Cluster) -> None:
        """As while a deployment is replaced."""
        pairs.prefills[0].failures = [ContractMismatch("dtype is float32 here and bfloat16 there")]
        received = await collect(pairs.stub.Generate(generate_request(stop=STOP)))
        assert tokens_of(received) == SEQUENCE[:30]
        assert received[-1].completion.route.replacements == 1
        assert len(pairs.prefills[1].prefills) == 1

    async def test_workers_of_which_none_match_end_the_request_by_name(
        self, pairs: Cluster
    ) -> None:
        for prefill in pairs.prefills:
            prefill.failures = [ContractMismatch("dtype is float32 here")] * 3
        error = await error_of(pairs.stub.Generate(generate_request(stop=STOP)))
        assert error.reason == "CONTRACT_MISMATCH"
        assert sum(len(prefill.prefills) for prefill in pairs.prefills) == 3

    async def test_an_only_pair_is_tried_again(self, system: Cluster) -> None:
        system.prefill.failures = [TransferFailed("the wire was cut")] * 2
        received = await collect(system.stub.Generate(generate_request(stop=STOP)))
        assert tokens_of(received) == SEQUENCE[:30]

    async def test_a_handoff_that_only_decode_tells_of_is_tried_elsewhere(
        self, pairs: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(attempt, "CAUSE_TIMEOUT_S", 0.0)
        silent, other = pairs.prefills
        silent.handoff_gate.clear()
        call = pairs.stub.Generate(generate_request(request_id="r", stop=STOP))
        first = await anext(aiter(call))
        pairs.decodes[0].fail("r", 0, TransferFailed("nothing came"))
        assert tokens_of([first, *await collect(call)]) == SEQUENCE[:30]
        assert len(other.prefills) == len(pairs.decodes[1].admits) == 1
        await silent.seen.until(lambda: silent.cancelled == ["r"])

    async def test_an_overloaded_prefill_worker_is_no_failure(self, system: Cluster) -> None:
        system.prefill.failures = [CapacityExhausted("full")] * 5
        received = await collect(system.stub.Generate(generate_request(stop=STOP)))
        assert tokens_of(received) == SEQUENCE[:30]

    async def test_a_prefill_worker_that_dies_after_the_handoff_is_not_missed(
        self, system: Cluster
    ) -> None:
        system.prefill.done_gate.clear()
        call = system.stub.Generate(generate_request(stop=STOP))
        responses = aiter(call)
        received = [await anext(responses), await anext(responses)]
        system.decode.round_gate.clear()
        system.prefill.generation = "prefill-2"
        await workers_seen(system.stub, lambda workers: workers[0].generation == "prefill-2")
        system.decode.round_gate.set()
        received += [response async for response in responses]
        assert tokens_of(received) == SEQUENCE[:30]
        assert received[-1].completion.route.replacements == 0

    async def test_a_restarted_decode_worker_gets_its_requests_again(self, system: Cluster) -> None:
        system.decode.round_gate.clear()
        call = system.stub.Generate(generate_request(stop=STOP))
        first = await anext(aiter(call))
        await system.decode.seen.until(lambda: bool(system.decode.admits))
        system.decode.generation = "decode-2"
        await system.decode.seen.until(lambda: len(system.decode.admits) == 2)
        system.decode.round_gate.set()
        assert tokens_of([first, *await collect(call)]) == SEQUENCE[:30]

    async def test_the_clients_own_error_is_not_tried_again(self, pairs: Cluster) -> None:
        pairs.prefills[0].failures = [InvalidRequest("not like this")]
        error = await error_of(pairs.stub.Generate(generate_request(stop=STOP)))
        assert error.message == "not like this"
        assert not pairs.prefills[1].prefills

    async def test_when_a_handoff_is_given_up_prefill_knows_why(
        self, system: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Decode hears of it first and can only say that it ended; that error would be tried again."""
        monkeypatch.setattr(attempt, "CAUSE_TIMEOUT_S", WAIT_S)
        system.prefill.start_gate.clear()
        system.prefill.failures = [CapabilityRefused("not this one")]
        call = system.stub.Generate(generate_request(request_id="r", stop=STOP))
        await system.prefill.seen.until(lambda: bool(system.prefill.prefills))
        system.decode.fail("r", 0, TransferFailed("the prefill worker gave up"))
        system.prefill.start_gate.set()
        assert (await error_of(call)).message == "not this one"

    async def test_after_the_last_attempt_the_last_error_is_the_clients(
        self, system: Cluster
    ) -> None:
        system.prefill.failures = [TransferFailed("the wire was cut")] * 9
        error = await error_of(system.stub.Generate(generate_request(stop=STOP)))
        assert error.reason == "KV_TRANSFER_FAILED"
        assert len(system.prefill.prefills) == 3

    async def test_after_tokens_were_shown_the_stream_is_interrupted(self, system: Cluster) -> None:
        system.decode.round_gate.clear()
        call = system.stub.Generate(generate_request(stop=STOP))
        await anext(aiter(call))
        await system.decode.seen.until(lambda: bool(system.decode.admits))
        system.prefill.failures = [TransferFailed("the wire was cut")] * 9
        system.decode.break_stream()
        error = await error_of(call)
        assert error.reason == "STREAM_INTERRUPTED"
        assert error.metadata["tokens_emitted"] == "1"
        assert error.metadata["cause"] == "KV_TRANSFER_FAILED"

    async def test_a_decode_worker_that_stalls_is_left(self, quick_pairs: Cluster) -> None:
        stalled, other = quick_pairs.decodes
        stalled.round_gate.clear()
        call = quick_pairs.stub.Generate(generate_request(stop=STOP))
        first = await anext(aiter(call))
        stalled.info_gate.clear()
        received = [first, *await collect(call)]
        assert tokens_of(received) == SEQUENCE[:30]
        assert other.admits
        await stalled.seen.until(lambda: stalled.num_streams_ended == 1)
        stalled.info_gate.set()

    async def test_a_prefill_worker_that_stalls_is_left(self, quick_pairs: Cluster) -> None:
        stalled, other = quick_pairs.prefills
        stalled.start_gate.clear()
        call = quick_pairs.stub.Generate(generate_request(stop=STOP))
        await stalled.seen.until(lambda: bool(stalled.prefills))
        stalled.info_gate.clear()
        assert tokens_of(await collect(call)) == SEQUENCE[:30]
        assert other.prefills
        await stalled.seen.until(lambda: bool(stalled.cancelled))
        stalled.info_gate.set()

    async def test_streams_that_break_at_random_cost_no_token(self, quick_pairs: Cluster) -> None:
        """Every tenth event breaks a stream under 12 requests; each token still comes once and in order."""
        rng = random.Random(20260730)
        for decode in quick_pairs.decodes:
            decode.mangle = breaking_at_random(decode, rng)
        calls = [
            collect(quick_pairs.stub.Generate(generate_request(num_prompt=n, stop=STOP)))
            for n in range(1, 13)
        ]
        for received in await asyncio.gather(*calls):
            assert tokens_of(received) == SEQUENCE[:30]

    async def test_a_missing_round_is_noticed_and_made_good(self, system: Cluster) -> None:
        dropped = False

        def without_the_second_round(event: object) -> list[object]:
            nonlocal dropped
            is_second = event.WhichOneof("event") == "verified" and event.verified.round == 2  # type: ignore[attr-defined]
            if is_second and not dropped:
                dropped = True
                return []
            return [event]

        system.decode.mangle = without_the_second_round  # type: ignore[assignment]
        received = await collect(system.stub.Generate(generate_request(stop=STOP)))
        assert tokens_of(received) == SEQUENCE[:30]
        assert received[-1].completion.route.replacements == 1


class TestRefusal:
    async def test_a_full_decode_worker_is_passed_by(self, pairs: Cluster) -> None:
        pairs.decodes[0].refusals = [CapacityExhausted("full")]
        received = await collect(pairs.stub.Generate(generate_request(stop=STOP)))
        assert tokens_of(received) == SEQUENCE[:30]
        assert len(pairs.decodes[1].admits) == 1
        assert received[-1].completion.route.replacements == 0

    async def test_a_decode_worker_that_fails_at_once_is_passed_by(self, pairs: Cluster) -> None:
        pairs.decodes[0].refusals = [ServingError("a bug")]
        received = await collect(pairs.stub.Generate(generate_request(stop=STOP)))
        assert tokens_of(received) == SEQUENCE[:30]
        assert len(pairs.decodes[1].admits) == 1

    async def test_requests_that_come_together_are_spread(self, pairs: Cluster) -> None:
        for decode in pairs.decodes:
            decode.reserve_gate.clear()
        for prefill in pairs.prefills:
            prefill.start_gate.clear()
        calls = [collect(pairs.stub.Generate(generate_request(stop=STOP))) for _ in range(8)]
        together = asyncio.gather(*calls)
        for decode in pairs.decodes:
            await decode.seen.until(lambda d=decode: len(d.reserves) == 4)  # type: ignore[misc]
        for decode in pairs.decodes:
            decode.reserve_gate.set()
        for prefill in pairs.prefills:
            await prefill.seen.until(lambda p=prefill: len(p.prefills) == 4)  # type: ignore[misc]
        for prefill in pairs.prefills:
            prefill.start_gate.set()
        await together

    async def test_with_all_full_a_request_waits_for_room(self, system: Cluster) -> None:
        system.decode.refusals = [CapacityExhausted("full")] * 2
        assert (
            tokens_of(await collect(system.stub.Generate(generate_request(stop=STOP))))
            == (SEQUENCE[:30])
        )
        assert len(system.decode.reserves) == 3

    async def test_and_is_refused_when_none_comes(self, tmp_path: Path) -> None:
        config = replace(
            router_config(write_tokenizer(tmp_path)), queue=QueueConfig(queue_timeout_s=0.3)
        )
        async with cluster(config, [FakePrefill(SEQUENCE)], [FakeDecode(SEQUENCE)]) as system:
            system.decode.refusals = [CapacityExhausted("no pages")] * 1000
            error = await error_of(system.stub.Generate(generate_request(stop=STOP)))
            assert error.reason == "CAPACITY_EXHAUSTED"
            assert error.retry_after_s is not None
            assert not system.prefill.prefills, "refused before any prefill work is spent"

    async def test_a_full_queue_says_when_to_come_back(self, tmp_path: Path) -> None:
        config = replace(router_config(write_tokenizer(tmp_path)), queue=QueueConfig(max_queued=1))
        async with cluster(config, [FakePrefill(SEQUENCE)], [FakeDecode(SEQUENCE)]) as system:
            system.decode.refusals = [CapacityExhausted("full")] * 1000
            waiting = system.stub.Generate(generate_request(stop=STOP))
            await system.decode.seen.until(lambda: bool(system.decode.reserves))
            error = await error_of(system.stub.Generate(generate_request(stop=STOP)))
            assert error.reason == "QUEUE_FULL"
            assert error.retry_after_s is not None and error.retry_after_s > 0
            system.decode.refusals = []
            await collect(waiting)

    @pytest.mark.parametrize(
        ("request_pb", "reason"),
        [
            (generate_request(model="gpt"), "MODEL_NOT_FOUND"),
            (generate_request(num_prompt=256), "CONTEXT_LENGTH_EXCEEDED"),
            (
                generate_request(num_prompt=200, stop=types_pb2.StopParams(max_tokens=57)),
                "CONTEXT_LENGTH_EXCEEDED",
            ),
            (generate_request(sampling=types_pb2.SamplingParams(top_p=1.5)), "INVALID_PARAMETER"),
            (generate_request(sampling=types_pb2.SamplingParams(logprobs=21)), "INVALID_PARAMETER"),
            (generate_request(stop=types_pb2.StopParams(max_tokens=0)), "INVALID_PARAMETER"),
            (generate_request(num_prompt=0), "INVALID_PARAMETER"),
            (pb.GenerateRequest(), "INVALID_PARAMETER"),
            (pb.GenerateRequest(text="x" * 1_000_000), "CONTEXT_LENGTH_EXCEEDED"),
            (pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[300])), "INVALID_PARAMETER"),
        ],
    )
    async def test_a_bad_request_costs_no_worker_anything(
        self, system: Cluster, request_pb: pb.GenerateRequest, reason: str
    ) -> None:
        call = system.stub.Generate(request_pb)
        assert (await error_of(call)).reason == reason
        assert not system.decode.reserves and not system.prefill.prefills

    async def test_without_workers_the_role_that_is_missing_is_named(self, system: Cluster) -> None:
        system.prefill.draining = True
        await workers_seen(
            system.stub, lambda workers: workers[0].state == pb.WORKER_STATE_DRAINING
        )
        error = await error_of(system.stub.Generate(generate_request(stop=STOP)))
        assert error.reason == "NO_READY_WORKERS"
        assert error.metadata["role"] == "prefill"

    async def test_a_worker_with_another_model_is_never_used(self, tmp_path: Path) -> None:
        config = router_config(write_tokenizer(tmp_path))
        stranger = FakePrefill(SEQUENCE)
        stranger.fingerprint = "model-b"
        async with cluster(
            config, [stranger, FakePrefill(SEQUENCE)], [FakeDecode(SEQUENCE)]
        ) as system:
            for _ in range(3):
                await collect(system.stub.Generate(generate_request(stop=STOP)))
            assert not stranger.prefills

    async def test_workers_that_were_all_replaced_by_another_model_serve_that_one(
        self, system: Cluster
    ) -> None:
        for worker in (system.decode, system.prefill):
            worker.fingerprint, worker.generation = "model-b", "next"
        await workers_seen(
            system.stub, lambda workers: all(worker.generation == "next" for worker in workers)
        )
        info = await system.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.fingerprint == "model-b"
        assert (
            tokens_of(await collect(system.stub.Generate(generate_request(stop=STOP))))
            == (SEQUENCE[:30])
        )


class TestDrain:
    async def test_running_requests_finish_and_new_ones_are_refused(self, system: Cluster) -> None:
        system.decode.round_gate.clear()
        call = system.stub.Generate(generate_request(stop=STOP))
        first = await anext(aiter(call))
        system.stop.set()
        while True:
            error = await error_of(system.stub.Generate(generate_request(model="x", stop=STOP)))
            if error.reason == "DRAINING":
                break
            await asyncio.sleep(0)
        system.decode.round_gate.set()
        assert tokens_of([first, *await collect(call)]) == SEQUENCE[:30]
        async with asyncio.timeout(WAIT_S):
            await system.serving


async def until_idle(system: Cluster) -> None:
    """Wait until the router has no request left."""
    async with asyncio.timeout(WAIT_S):
        while True:
            info = await system.stub.GetServerInfo(pb.GetServerInfoRequest())
            if info.queued_requests == info.running_requests == 0:
                return
            await asyncio.sleep(LOOK_S)
