"""State that a prefill worker keeps goes to further decode workers without being computed again."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequest, LeaseEnded
from tests.support import engines
from tests.support.figures import figure
from tests.support.handoff_cluster import a_context
from tests.support.kept import NUM_TOKENS, kept
from tests.support.refusals import refusal
from tests.support.sender import release


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
        await release(it.other, wrong, reserved)


async def test_a_lease_that_is_gone_is_said_by_name() -> None:
    async with kept() as it:
        context = it.later(3)
        reserved = await it.other.reserve(context)
        assert isinstance(await refusal(it.ask(context, reserved, lease_id="?")), LeaseEnded)
        it.first.prefill.release_lease(it.lease_id)
        assert isinstance(await refusal(it.ask(context, reserved)), LeaseEnded)
        await release(it.other, context, reserved)
