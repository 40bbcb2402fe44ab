"""A hand-off is its holder's alone: no other secret, epoch or prefill worker opens it."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pytest

from common.errors import CapabilityRefused, DuplicateRequest, RequestNotFound
from common.rpc import transfer_stream
from common.transfer import convert
from dspark.v1 import handoff_service_pb2
from tests.support.handoff_cluster import Cluster, a_context
from tests.support.refusals import refusal, refusals
from tests.support.sender import a_result, key_of, negotiate, negotiated, offer, release, write
from tests.support.waiting import WAIT_S


async def test_only_the_holder_of_the_capability_may_negotiate_write_complete_or_admit(
    it: Cluster,
) -> None:
    context, reserved, key, _ = await negotiated(it)
    wrong = secrets.token_bytes(32)
    (message,) = transfer_stream.pack([transfer_stream.Piece(0, 0, memoryview(b"x"))])
    completion = convert.result_to_pb(a_result(130), key, wrong)
    aborting = handoff_service_pb2.AbortHandoffRequest(key=convert.key_to_pb(key), capability=wrong)
    for refused in (
        refusal(negotiate(it, key, wrong, offer(130))),
        refusal(negotiate(it, key, b"", offer(130))),
        refusal(it.handoff_stub.Complete(completion, timeout=WAIT_S)),
        refusal(it.handoff_stub.AbortHandoff(aborting, timeout=WAIT_S)),
    ):
        assert isinstance(await refused, CapabilityRefused)
    with pytest.raises(CapabilityRefused):
        await write(it, key, wrong, message)
    stream = it.stream()
    await stream.admit(context, reserved, capability=wrong)
    assert (await stream.next("failed")).reason == "CAPABILITY_REFUSED"
    assert refusals(it) == {"capability_refused": 6}
    await release(it, context, reserved)


async def test_the_capability_of_an_older_epoch_opens_nothing(it: Cluster) -> None:
    old_context = a_context(130, epoch=1)
    old = await it.reserve(old_context)
    context = a_context(130, epoch=2)
    reserved = await it.reserve(context)
    assert it.decode.room.num_free_slots == it.decode.room.num_slots - 1

    late = refusal(negotiate(it, key_of(old_context, old), old.capability, offer(130)))
    assert isinstance(await late, RequestNotFound)
    mixed = refusal(negotiate(it, key_of(context, reserved), old.capability, offer(130)))
    assert isinstance(await mixed, CapabilityRefused)
    other_epoch = key_of(old_context, reserved)
    replayed = refusal(negotiate(it, other_epoch, reserved.capability, offer(130)))
    assert isinstance(await replayed, RequestNotFound)
    stale = refusal(it.reserve(a_context(130, epoch=1)))
    assert isinstance(await stale, RequestNotFound)
    await release(it, context, reserved)


async def test_a_second_prefill_worker_cannot_take_over_a_handoff(it: Cluster) -> None:
    context, reserved, key, terms = await negotiated(it)
    other = replace(key, prefill_generation="g2")
    error = await refusal(negotiate(it, other, reserved.capability, offer(130)))
    assert isinstance(error, DuplicateRequest)
    assert refusals(it) == {"duplicate_request": 1}
    # The first one may repeat its question and gets the same answer.
    assert await negotiate(it, key, reserved.capability, offer(130)) == terms
    await release(it, context, reserved)
