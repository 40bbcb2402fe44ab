"""The path of a request through the router, over sockets, with scripted workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio

from dspark.v1 import decode_service_pb2, types_pb2
from dspark.v1 import inference_service_pb2 as pb
from tests.support.chat_tokenizer import write_tokenizer
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.router_cluster import (
    SEQUENCE,
    Cluster,
    cluster,
    collect,
    error_of,
    generate_request,
    router_config,
    tokens_of,
)


def stop_after(num_tokens: int) -> types_pb2.StopParams:
    return types_pb2.StopParams(max_tokens=num_tokens)


async def reason_of(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> str:
    """The reason of the error that a call ends with."""
    return (await error_of(call)).reason


async def test_tokens_come_in_order_and_the_last_message_tells_the_story(system: Cluster) -> None:
    responses = await collect(system.stub.Generate(generate_request(stop=stop_after(9))))
    assert tokens_of(responses) == SEQUENCE[:9]
    assert [response.HasField("completion") for response in responses] == [False] * 3 + [True]
    completion = responses[-1].completion
    assert completion.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert completion.usage == pb.Usage(
        prompt_tokens=8, completion_tokens=9, rounds=3, draft_tokens=6, accepted_tokens=6
    )
    route = completion.route
    assert route.transfer_engine == "fake"
    assert route.prefill_worker and route.decode_worker and route.replacements == 0
    timings = completion.timings
    assert 0 < timings.queue_s <= timings.time_to_first_token_s <= timings.total_s


async def test_decode_is_told_what_was_committed_and_that_it_was_the_end(system: Cluster) -> None:
    await collect(system.stub.Generate(generate_request(stop=stop_after(8))))
    await system.decode.seen.until(
        lambda: bool(system.decode.commits) and system.decode.commits[-1].finish
    )
    assert [(c.round, c.length, c.finish) for c in system.decode.commits] == [
        (1, 12, False),
        (2, 15, False),
        (3, 16, True),
    ]
    assert not system.decode.aborts


async def test_the_lease_of_a_finished_request_is_released(system: Cluster) -> None:
    await collect(system.stub.Generate(generate_request(stop=stop_after(8))))
    await system.prefill.seen.until(lambda: system.prefill.released == ["reservation-1"])


async def test_the_first_token_does_not_wait_for_the_handoff(system: Cluster) -> None:
    system.prefill.handoff_gate.clear()
    call = system.stub.Generate(generate_request(stop=stop_after(5)))
    first = await anext(aiter(call))
    assert list(first.token_ids) == SEQUENCE[:1]
    assert not system.decode.commits
    system.prefill.handoff_gate.set()
    assert tokens_of([first, *await collect(call)]) == SEQUENCE[:5]


async def test_the_first_token_may_come_from_decode_alone(system: Cluster) -> None:
    system.prefill.says_first_token = False
    responses = await collect(system.stub.Generate(generate_request(stop=stop_after(6))))
    assert tokens_of(responses) == SEQUENCE[:6]


async def test_decode_listens_before_prefill_begins(system: Cluster) -> None:
    system.prefill.start_gate.clear()
    call = system.stub.Generate(generate_request(stop=stop_after(2)))
    await system.prefill.seen.until(lambda: bool(system.prefill.prefills))
    await system.decode.seen.until(lambda: bool(system.decode.admits))
    admit, prefill = system.decode.admits[0], system.prefill.prefills[0]
    assert admit.context == prefill.context
    assert admit.reservation_id == prefill.ticket.reservation_id
    assert admit.capability == prefill.ticket.capability == b"secret"
    system.prefill.start_gate.set()
    await collect(call)


async def test_one_token_needs_no_round(system: Cluster) -> None:
    responses = await collect(system.stub.Generate(generate_request(stop=stop_after(1))))
    assert tokens_of(responses) == SEQUENCE[:1]
    assert responses[-1].completion.usage.rounds == 0


async def test_a_prompt_that_decode_computes_needs_no_prefill_worker(system: Cluster) -> None:
    system.decode.computes_prompt = True
    responses = await collect(system.stub.Generate(generate_request(stop=stop_after(7))))
    assert tokens_of(responses) == SEQUENCE[:7]
    completion = responses[-1].completion
    assert completion.usage.rounds == 2, "the prompt's own round is none"
    assert completion.route.prefill_worker == ""
    assert not system.prefill.prefills


async def test_seed_and_verification_follow_from_whether_the_client_gave_a_seed(
    system: Cluster,
) -> None:
    unseeded = generate_request(
        stop=stop_after(1), sampling=types_pb2.SamplingParams(temperature=1)
    )
    seeded = generate_request(
        stop=stop_after(1), sampling=types_pb2.SamplingParams(temperature=1, seed=7)
    )
    for request in (unseeded, unseeded, seeded):
        await collect(system.stub.Generate(request))
    sampling = [prefill.context.sampling for prefill in system.prefill.prefills]
    assert [s.verification for s in sampling] == [
        types_pb2.VERIFICATION_REJECTION,
        types_pb2.VERIFICATION_REJECTION,
        types_pb2.VERIFICATION_COUPLED,
    ]
    assert sampling[2].seed == 7
    assert len({s.seed for s in sampling}) == 3


async def test_absent_max_tokens_means_what_the_context_leaves(system: Cluster) -> None:
    call = system.stub.Generate(generate_request(num_prompt=200))
    await anext(aiter(call))
    assert system.decode.admits[0].context.stop.max_tokens == 56
    call.cancel()


async def test_a_stop_string_that_spans_rounds_is_never_shown_in_part(tmp_path: Path) -> None:
    config = router_config(write_tokenizer(tmp_path))
    sequence = [ord(char) - ord("!") + 6 for char in "the-cat-stops-here-and-there"]
    decode = FakeDecode(sequence)
    async with cluster(config, [FakePrefill(sequence)], [decode]) as system:
        stop = types_pb2.StopParams(max_tokens=28, stop=["stops"])
        responses = await collect(system.stub.Generate(generate_request(stop=stop)))
        text = ""
        for response in responses:
            text += response.text
            assert "the-cat-".startswith(text), text
        assert text == "the-cat-"
        completion = responses[-1].completion
        assert completion.finish_reason == types_pb2.FINISH_REASON_STOP
        assert completion.matched_stop == "stops"
        assert tokens_of(responses) == sequence[:13]
        await decode.seen.until(lambda: decode.commits[-1].finish)
        assert decode.commits[-1].length == 8 + 13


async def test_logprobs_are_cut_with_the_tokens(system: Cluster) -> None:
    system.decode.logprobs = True
    responses = await collect(
        system.stub.Generate(
            generate_request(stop=stop_after(6), sampling=types_pb2.SamplingParams(logprobs=0))
        )
    )
    logprobs = [logprob.token_id for response in responses for logprob in response.logprobs]
    assert logprobs == SEQUENCE[1:6], "the fake prefill worker reports none"


async def test_repeated_and_late_rounds_change_nothing(system: Cluster) -> None:
    sent: list[decode_service_pb2.DecodeEvent] = []

    def with_repeats(
        event: decode_service_pb2.DecodeEvent,
    ) -> list[decode_service_pb2.DecodeEvent]:
        sent.append(event)
        return [event, *sent[-3:]]

    system.decode.mangle = with_repeats
    responses = await collect(system.stub.Generate(generate_request(stop=stop_after(20))))
    assert tokens_of(responses) == SEQUENCE[:20]
    assert responses[-1].completion.route.replacements == 0


async def test_abort_ends_a_running_request_with_its_finish_reason(system: Cluster) -> None:
    system.decode.round_gate.clear()
    call = system.stub.Generate(generate_request(request_id="mine", stop=stop_after(50)))
    first = await anext(aiter(call))
    assert (await system.stub.Abort(pb.AbortRequest(request_id="mine"))).found
    responses = [first, *await collect(call)]
    assert responses[-1].completion.finish_reason == types_pb2.FINISH_REASON_ABORT
    assert tokens_of(responses) == SEQUENCE[:1]
    await system.decode.seen.until(lambda: bool(system.decode.aborts))


async def test_abort_of_an_unknown_request_says_so(system: Cluster) -> None:
    assert not (await system.stub.Abort(pb.AbortRequest(request_id="nobody"))).found


async def test_a_second_request_with_a_live_id_is_refused(system: Cluster) -> None:
    system.decode.round_gate.clear()
    call = system.stub.Generate(generate_request(request_id="twin", stop=stop_after(5)))
    first = await anext(aiter(call))
    assert (
        await reason_of(system.stub.Generate(generate_request(request_id="twin")))
        == "DUPLICATE_REQUEST"
    )
    system.decode.round_gate.set()
    assert tokens_of([first, *await collect(call)]) == SEQUENCE[:5]


async def test_an_id_that_is_used_again_begins_in_a_new_epoch(system: Cluster) -> None:
    """Or a late message of the first request would be taken for the second's."""
    for _ in range(3):
        request = generate_request(request_id="again", stop=stop_after(7))
        responses = await collect(system.stub.Generate(request))
        assert tokens_of(responses) == SEQUENCE[:7]
        assert responses[-1].completion.route.replacements == 0
    assert [admit.epoch for admit in system.decode.admits] == [0, 1, 2]


async def test_many_requests_share_one_stream(system: Cluster) -> None:
    calls = [
        collect(system.stub.Generate(generate_request(num_prompt=n, stop=stop_after(10 + n))))
        for n in range(1, 33)
    ]
    for n, responses in enumerate(await asyncio.gather(*calls), start=1):
        assert tokens_of(responses) == SEQUENCE[: 10 + n]
