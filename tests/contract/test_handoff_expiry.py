"""What nobody comes for ends by itself with everything that it holds, and nothing else does."""

from __future__ import annotations

import pytest

from common.errors import DeadlinePassed, RequestNotFound
from tests.support.handoff_cluster import a_context
from tests.support.handoff_pair import Pair, close_gate, open_gate, require_exact
from tests.support.held_transfer import HeldTransfer
from tests.support.refusals import ended


@pytest.mark.parametrize("state", ["reserved", "receiving", "ready"])
async def test_a_reservation_that_no_router_admits_expires_with_everything_it_holds(
    pair: Pair, state: str
) -> None:
    it, context = pair.it, a_context(400)
    reserved = await it.reserve(context)
    (reservation,) = it.decode.reservations.all()
    call = None
    if state == "receiving":
        close_gate(pair.source).release(3)
        call = it.start_prefill(context, reserved)
        await it.until(lambda: it.decode.intake.counts["received_bytes"] > 0)
    elif state == "ready":
        await it.hand_over(context, reserved)
    assert reservation.state.value == state
    it.decode.expire()
    assert len(it.decode.reservations) == 1
    reservation.expires_at = 0.0
    it.decode.expire()
    assert len(it.decode.reservations) == 0
    if call is not None:
        open_gate(pair.source)
        assert isinstance(await ended(call), RequestNotFound)
    stream = it.stream()
    await stream.admit(context, reserved)
    assert (await stream.next("failed")).reason == "REQUEST_NOT_FOUND"
    await it.require_clean()
    await require_exact(pair)


async def test_an_admitted_request_does_not_expire_while_its_prompt_waits_for_its_turn(
    pair: Pair,
) -> None:
    """The router that admitted it watches over it; a long queue at prefill must not end it here."""
    it, context, stream = pair.it, a_context(100), pair.it.stream()
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    await it.until(lambda: len(it.decode._admissions) == 1)
    it.decode.reservations.all()[0].expires_at = 0.0
    it.decode.expire()
    await it.hand_over(context, reserved)
    await stream.next("admitted")
    await stream.abort(context)
    await stream.skip_to("finished")


async def test_a_prefill_that_nobody_ends_and_nothing_moves_ends_by_itself(pair: Pair) -> None:
    """Whatever its caller allows: here a write is never over."""
    it, context, stream = pair.it, a_context(200), pair.it.stream()
    held = HeldTransfer(it)
    it.prefill._courses._job_timeout_s = 0.1
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    error = await ended(it.start_prefill(context, reserved))
    assert isinstance(error, DeadlinePassed)
    assert (await stream.next("failed")).reason == "KV_TRANSFER_FAILED"
    held.restore()
    it.prefill._courses._job_timeout_s = 60.0
    await it.require_clean()
    await require_exact(pair)
