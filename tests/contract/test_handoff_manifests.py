"""A manifest that is not the one of the state ends its request by name, and blames nobody who asked for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from common.errors import InvalidRequest, TransferFailed
from common.transfer import convert
from common.transfer.manifest import MAX_MANIFEST_ENTRIES, ManifestEntry
from tests.support import figures
from tests.support.handoff_cluster import Cluster, a_context
from tests.support.refusals import ended, refusal, refusals
from tests.support.sender import a_result, negotiated
from tests.support.waiting import WAIT_S

Manifest = tuple[ManifestEntry, ...]
MANIFESTS: list[tuple[Callable[[Manifest], Manifest], str]] = [
    (lambda m: (*m, m[0]), "row 2 of window twice"),
    (lambda m: (replace(m[0], first_row=0, num_rows=130), *m[1:]), "before the first expected row"),
    (lambda m: (replace(m[0], num_rows=4_000_000_000), *m[1:]), "up to 4000000001; the last"),
    (lambda m: (replace(m[0], num_bytes=1), *m[1:]), "counts 1 bytes for 128 rows of window"),
    (lambda m: (replace(m[0], region="strange"), *m[1:]), "names region strange"),
    (lambda m: m * (MAX_MANIFEST_ENTRIES // len(m) + 1), "entries; at most 65536 are read"),
]


async def test_a_manifest_that_lacks_rows_ends_the_request_with_their_names(it: Cluster) -> None:
    context, reserved, key, _ = await negotiated(it)
    stream = it.stream()
    await stream.admit(context, reserved)
    result = a_result(130)
    result = replace(result, manifest=result.manifest[1:])
    request = convert.result_to_pb(result, key, reserved.capability)
    error = await refusal(it.handoff_stub.Complete(request, timeout=WAIT_S))
    assert isinstance(error, TransferFailed)
    assert "rows 2 to 129 of window are missing" in error.message
    failed = await stream.next("failed")
    assert (failed.reason, failed.message) == ("KV_TRANSFER_FAILED", error.message)
    assert refusals(it) == {}


@pytest.mark.parametrize(("change", "words"), MANIFESTS)
async def test_manifests_that_are_too_long_or_overlap_or_name_other_rows_end_the_request_by_name(
    it: Cluster, change: Callable[[Manifest], Manifest], words: str
) -> None:
    context, reserved, key, _ = await negotiated(it)
    stream = it.stream()
    await stream.admit(context, reserved)
    result = a_result(130)
    result = replace(result, manifest=change(result.manifest))
    request = convert.result_to_pb(result, key, reserved.capability)
    error = await refusal(it.handoff_stub.Complete(request, timeout=WAIT_S))
    assert isinstance(error, InvalidRequest)
    assert words in error.message
    assert refusals(it) == {"manifest": 1}
    # It is the sender's mistake: the router hears of a transfer that failed and places the request again.
    failed = await stream.next("failed")
    assert (failed.reason, failed.message) == ("KV_TRANSFER_FAILED", error.message)


async def test_a_sender_whose_manifest_is_refused_blames_nobody_who_asked_it(it: Cluster) -> None:
    """The router would take INVALID_ARGUMENT for its client's fault and not place the request again."""
    context, stream = a_context(130), it.stream()
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    intake = cast(Any, it.decode.intake)
    complete = intake.complete
    intake.complete = lambda key, capability, result: complete(
        key, capability, replace(result, manifest=result.manifest * 2)
    )
    error = await ended(it.start_prefill(context, reserved))
    assert isinstance(error, TransferFailed)
    assert "row 2 of window twice" in error.message
    failures = "dspark_kv_transfer_failures_total"
    assert figures.figure(it.prefill.metrics.registry, failures, reason="refused") == 1
    assert (await stream.next("failed")).reason == "KV_TRANSFER_FAILED"
