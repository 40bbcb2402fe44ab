"""What a router asks of workers that they cannot keep is refused by name, and nothing is lost by it."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import (
    CapacityExhausted,
    ContextLengthExceeded,
    ContractMismatch,
    InvalidRequest,
    ServingError,
)
from tests.support.handoff_cluster import Cluster, a_context
from tests.support.refusals import ended, refusal, refusals
from tests.support.sender import release


async def test_a_full_worker_refuses_before_any_prefill_work_with_a_time_to_retry(
    it: Cluster,
) -> None:
    held = [a_context(300, request_id=f"r{i}", max_tokens=200) for i in range(4)]
    reserved = [await it.reserve(context) for context in held]
    error = await refusal(it.reserve(a_context(10, request_id="late")))
    assert isinstance(error, CapacityExhausted)
    assert error.retry_after_s == 1.0
    assert it.prefill.num_jobs == 0
    for context, reservation in zip(held, reserved, strict=True):
        await release(it, context, reservation)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        (
            {"max_length": 2000},
            ContextLengthExceeded,
            "may reach 2000 tokens; this worker takes 1024",
        ),
        ({"num_tokens": 0}, InvalidRequest, "0 tokens of at most"),
        ({"num_tokens": 42, "max_length": 42}, InvalidRequest, "leave nothing to generate"),
        ({"model_fingerprint": "other"}, ContractMismatch, "but other at the router"),
    ],
)
async def test_reservations_that_cannot_be_kept_are_refused(
    it: Cluster, changes: dict[str, Any], kind: type[ServingError], words: str
) -> None:
    error = await refusal(it.reserve(a_context(10), **changes))
    assert isinstance(error, kind)
    assert words in error.message


async def test_a_context_that_is_not_the_reserved_one_fails_and_frees(it: Cluster) -> None:
    for context in (a_context(11), a_context(10, max_tokens=33)):
        stream = it.stream()
        reserved = await it.reserve(a_context(10))
        await stream.admit(context, reserved)
        assert (await stream.next("failed")).reason == "INVALID_PARAMETER"
        await it.require_clean()


async def test_a_prefill_of_nothing_or_of_too_much_is_refused(it: Cluster) -> None:
    for context, kind in (
        (a_context(10, max_tokens=2000), ContextLengthExceeded),
        (a_context(40, num_committed=32, max_tokens=32), InvalidRequest),
    ):
        reserved = await it.reserve(a_context(10))
        error = await ended(it.start_prefill(context, reserved))
        assert isinstance(error, kind)
        await release(it, a_context(10), reserved)


async def test_a_command_without_content_ends_the_stream_with_its_name(it: Cluster) -> None:
    stream = it.stream()
    await stream.send()
    error = await refusal(stream.call.read())
    assert isinstance(error, InvalidRequest)
    assert "neither admit nor commit nor abort" in error.message
    assert refusals(it) == {"malformed": 1}
