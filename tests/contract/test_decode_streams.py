"""A router's stream to a decode worker: its commits, its pace, its messages and its end."""

from __future__ import annotations

import pytest

from tests.support.handoff_cluster import a_context
from tests.support.handoff_pair import Pair, close_gate, open_gate, running


async def test_commits_may_be_repeated_and_may_not_invent(pair: Pair) -> None:
    it, stream = pair.it, pair.it.stream()
    context, _ = await running(pair, stream)
    for number in (1, 2):
        assert (await stream.next("verified")).round == number
    # Two rounds are out, and the engine waits for a commit.
    await stream.commit(context, 1, 203)
    await stream.commit(context, 1, 203)
    assert (await stream.next("verified")).round == 3
    await stream.commit(context, 3, 207)
    for number in (4, 5):
        assert (await stream.next("verified")).round == number
    await stream.commit(context, 9, 999)
    failed = await stream.next("failed")
    assert "round 9, but the last one offered is 5" in failed.message
    await it.require_clean()


async def test_a_commit_may_cut_a_round_only_to_finish(pair: Pair) -> None:
    it, stream = pair.it, pair.it.stream()
    context, _ = await running(pair, stream)
    await stream.next("verified")
    await stream.commit(context, 1, 202, finish=True)
    await stream.skip_to("finished")
    await it.require_clean()

    context, _ = await running(pair, stream, "s")
    await stream.next("verified")
    await stream.commit(context, 1, 202)
    assert "only a finish may cut" in (await stream.skip_to("failed")).message


async def test_one_engine_step_is_one_message(pair: Pair) -> None:
    it, stream = pair.it, pair.it.stream()
    close_gate(pair.sink)
    contexts = []
    for index in range(3):
        context = a_context(20, request_id=f"r{index}")
        reserved = await it.reserve(context)
        await stream.admit(context, reserved)
        await it.hand_over(context, reserved)
        contexts.append(context)
    for _ in contexts:
        await stream.next("admitted")
    num_messages = len(stream.messages)
    open_gate(pair.sink)
    for _ in contexts:
        await stream.skip_to("verified")
    assert any(len(message.events) >= 2 for message in stream.messages[num_messages:])
    for context in contexts:
        await stream.abort(context)
    await it.until(lambda: len(it.decode.reservations) == 0)


async def test_a_slow_router_pauses_its_request_and_nobody_elses(pair: Pair) -> None:
    slow, quick = pair.it.stream(), pair.it.stream()
    slow_context, _ = await running(pair, slow, "slow")
    context, _ = await running(pair, quick, "quick")
    for number in range(1, 6):
        verified = await quick.next("verified")
        assert verified.round == number
        await quick.commit(context, number, verified.base + len(verified.token_ids))
    assert pair.sink.requests[slow_context.request_id].round == 2
    for stream, each in ((slow, slow_context), (quick, context)):
        await stream.abort(each)
        await stream.skip_to("finished")


@pytest.mark.parametrize("is_abrupt", [True, False])
async def test_the_end_of_a_routers_stream_ends_its_requests_and_no_others(
    pair: Pair, is_abrupt: bool
) -> None:
    it = pair.it
    going, staying = it.stream(), it.stream()
    await running(pair, going, "a")
    kept, _ = await running(pair, staying, "b")
    admitted_only = a_context(30, request_id="c")
    await going.admit(admitted_only, await it.reserve(admitted_only))
    if is_abrupt:
        going.call.cancel()
    else:
        await going.call.done_writing()
    await it.until(lambda: len(it.decode.reservations) == 1)
    await staying.next("verified")
    await staying.commit(kept, 1, 203)
    await staying.abort(kept)
    await staying.skip_to("finished")
    await it.require_clean()
