"""Who and what a decode worker refuses, by name, and that nothing is lost by it."""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from common.errors import (
    CapabilityRefused,
    CapacityExhausted,
    ContextLengthExceeded,
    ContractMismatch,
    DuplicateRequest,
    InvalidRequest,
    PairUnknown,
    RequestNotFound,
    ServingError,
    TransferFailed,
)
from common.kv_cache.layout import CacheLayout
from common.rpc import transfer_stream
from common.rpc.status import error_of_call
from common.telemetry.metrics.transfer import REFUSALS
from common.transfer import convert
from common.transfer.handoff import CacheContract, HandoffKey, HandoffOffer, HandoffResult
from common.transfer.manifest import MAX_MANIFEST_ENTRIES, ManifestEntry, manifest_of
from common.transfer.meeting import Introduction
from common.transfer.plan import live_rows
from common.types import Proposal, RequestContext
from dspark.v1 import handoff_service_pb2
from tests.support import figures
from tests.support.fake_engine import FINGERPRINT, FakeEngine, loaded
from tests.support.handoff_cluster import Cluster, a_context, cluster
from tests.support.small_cache import small_layout
from tests.support.waiting import WAIT_S

LAYOUT = small_layout()

Manifest = tuple[ManifestEntry, ...]


@pytest.fixture
async def it() -> AsyncIterator[Cluster]:
    async with cluster(loaded(FakeEngine(LAYOUT)), loaded(FakeEngine(LAYOUT))) as running:
        yield running
        await running.require_clean()


async def refusal(call: Any) -> ServingError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_of_call(caught.value, peer="peer")


def refusals(it: Cluster) -> dict[str, float]:
    """What the decode worker has counted, by reason; nothing that is 0."""
    name = "dspark_kv_refusals_total"
    registry = it.decode.metrics.registry
    counts = {reason: figures.figure(registry, name, reason=reason) for reason in REFUSALS}
    return {reason: count for reason, count in counts.items() if count}


async def refused_prefill(call: Any) -> ServingError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return error_of_call(caught.value, peer="peer")


def key_of(context: RequestContext, reserved: Any, *, generation: str = "g1") -> HandoffKey:
    return HandoffKey(
        request_id=context.request_id,
        epoch=context.epoch,
        reservation_id=reserved.reservation_id,
        prefill_generation=generation,
    )


def offer(num_tokens: int, **changes: Any) -> HandoffOffer:
    """As by a sender that has met the worker; `negotiate` fills its generation in."""
    fields: dict[str, Any] = {
        "num_tokens": num_tokens,
        "decode_generation": "",
        "transfer_engine": "grpc",
    }
    return HandoffOffer(**(fields | changes))


async def negotiate(it: Cluster, key: HandoffKey, capability: bytes, what: HandoffOffer) -> Any:
    generation = what.decode_generation or it.decode.identity.generation
    what = replace(what, decode_generation=generation)
    return await it.handoff_stub.Negotiate(
        convert.offer_to_pb(what, key, capability), timeout=WAIT_S
    )


async def meet(
    it: Cluster,
    layout: CacheLayout = LAYOUT,
    *,
    fingerprint: str = FINGERPRINT,
    transfer_engines: tuple[str, ...] = ("grpc",),
) -> Any:
    """Introduce a sender of generation g1."""
    introduction = Introduction(
        generation="g1",
        address="prefill:1",
        contract=CacheContract(
            model_fingerprint=fingerprint, layout=layout, drafter_fingerprint="drafter"
        ),
        transfer_engines=transfer_engines,
    )
    return await it.handoff_stub.Meet(convert.introduction_to_pb(introduction), timeout=WAIT_S)


async def negotiated(
    it: Cluster, num_tokens: int = 130
) -> tuple[RequestContext, Any, HandoffKey, Any]:
    await meet(it)
    context = a_context(num_tokens)
    reserved = await it.reserve(context)
    key = key_of(context, reserved)
    return context, reserved, key, await negotiate(it, key, reserved.capability, offer(num_tokens))


async def write(it: Cluster, key: HandoffKey, capability: bytes, *messages: bytes) -> int:
    return await transfer_stream.send(
        it.decode_channel,
        iter(messages),
        peer="decode",
        key=convert.key_to_pb(key).SerializeToString(),
        capability=capability,
        timeout_s=WAIT_S,
    )


async def release(it: Cluster, context: RequestContext, reserved: Any) -> None:
    stream = it.stream()
    await stream.abort(context, reserved.reservation_id)
    await stream.next("finished")


REGION_CHANGES = [
    (0, {"name": "windows"}, "cache regions differ"),
    (1, {"layer_ids": (1, 3)}, r"csa: layer_ids is \(1, 2\) at decode but \(1, 3\) at prefill"),
    (1, {"ratio": 8}, "csa: ratio is 4 at decode but 8 at prefill"),
    (0, {"row_width": 6}, "window: row_width is 3 at decode but 6 at prefill"),
    (0, {"dtype": "bfloat16"}, "window: dtype is float32 at decode but bfloat16 at prefill"),
    (0, {"window_rows": 64}, "window: window_rows is 128 at decode but 64 at prefill"),
    (3, {"tail_group": 8}, "csa_tail: tail_group is 4 at decode but 8 at prefill"),
]


@pytest.mark.parametrize(("region", "change", "words"), REGION_CHANGES)
async def test_a_contract_that_differs_is_refused_by_field_with_both_values(
    it: Cluster, region: int, change: dict[str, Any], words: str
) -> None:
    regions = list(LAYOUT.regions)
    regions[region] = replace(regions[region], **change)
    error = await refusal(meet(it, CacheLayout(regions=tuple(regions))))
    assert isinstance(error, ContractMismatch)
    assert re.search(words, error.message)
    assert refusals(it) == {"contract_mismatch": 1}
    # Nobody was met, so nothing can be handed over.
    context = a_context(130)
    reserved = await it.reserve(context)
    key = key_of(context, reserved)
    unknown = refusal(negotiate(it, key, reserved.capability, offer(130)))
    assert isinstance(await unknown, PairUnknown)
    assert refusals(it) == {"contract_mismatch": 1, "pair_unknown": 1}
    # The reservation is as it was: a peer that fits may still use it.
    await meet(it)
    await negotiate(it, key, reserved.capability, offer(130))
    await release(it, context, reserved)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"fingerprint": "other"},
            f"model fingerprint is {FINGERPRINT} at decode but other at prefill",
        ),
        (
            {"transfer_engines": ("nixl",)},
            r"transfer_engines are ['grpc'] at decode but ['nixl'] at prefill",
        ),
    ],
)
async def test_a_sender_that_does_not_fit_is_refused_by_name(
    it: Cluster, changes: dict[str, Any], words: str
) -> None:
    error = await refusal(meet(it, **changes))
    assert isinstance(error, ContractMismatch)
    assert words in error.message
    assert refusals(it) == {"contract_mismatch": 1}


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        (
            {"num_tokens": 131},
            ContractMismatch,
            "num_tokens is 130 in the reservation but 131 at prefill",
        ),
        ({"decode_generation": "older"}, PairUnknown, "met decode generation 'older'; this is"),
        ({"transfer_engine": "nixl"}, PairUnknown, "['grpc'] at decode but the sender would use"),
    ],
)
async def test_terms_that_do_not_fit_are_refused_by_name(
    it: Cluster, changes: dict[str, Any], kind: type[ServingError], words: str
) -> None:
    await meet(it)
    context = a_context(130)
    reserved = await it.reserve(context)
    what = offer(**{"num_tokens": 130, **changes})
    error = await refusal(negotiate(it, key_of(context, reserved), reserved.capability, what))
    assert isinstance(error, kind)
    assert words in error.message
    assert sum(refusals(it).values()) == 1
    await release(it, context, reserved)


async def test_a_prefill_worker_of_another_model_ends_with_the_named_field() -> None:
    wrong = loaded(FakeEngine(LAYOUT), fingerprint="other")
    async with cluster(wrong, loaded(FakeEngine(LAYOUT))) as it:
        context = a_context(130)
        reserved = await it.reserve(context)
        error = await refused_prefill(it.start_prefill(context, reserved))
        assert isinstance(error, ContractMismatch)
        assert "model fingerprint" in error.message
        await it.require_clean()


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


def a_result(num_tokens: int, **changes: Any) -> HandoffResult:
    memory = FakeEngine(LAYOUT).memory
    rows = live_rows(LAYOUT, num_tokens, has_drafter_state=True)
    fields: dict[str, Any] = {
        "manifest": manifest_of(LAYOUT, memory.regions, rows),
        "digests": (bytes(16),) * len(LAYOUT.regions),
        "first_token_id": 3,
        "first_logprob": None,
        "proposal": Proposal(),
        "has_drafter_state": True,
    }
    return HandoffResult(**(fields | changes))


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


async def test_writes_outside_the_grant_are_refused_and_leave_no_trace(it: Cluster) -> None:
    context, reserved, key, terms = await negotiated(it)
    memory = (await meet(it)).memory
    window, csa = memory[0], memory[1]
    total = sum(r.total_bytes for r in memory)
    foreign_page = next(page for page in range(16) if page not in terms.page_ids)
    cases = [
        (0, (terms.slot + 1) * window.block_stride_bytes, "window touches block 1"),
        (1, foreign_page * csa.block_stride_bytes, "csa touches block"),
        (1, csa.total_bytes, "csa, which has"),
        (9, 0, "region 9; the contract has regions 0 to 7"),
    ]
    for region, offset, words in cases:
        (message,) = transfer_stream.pack(
            [transfer_stream.Piece(region, offset, memoryview(b"\xff" * 8))]
        )
        with pytest.raises(InvalidRequest, match=words):
            await write(it, key, reserved.capability, message)
    assert it.decode.intake.counts["refused_writes"] == len(cases)
    assert refusals(it) == {"write": len(cases)}
    assert it.decode.intake.counts["received_bytes"] == 0 < total
    # The last page of the reservation is for generated tokens: prefill has no business there.
    assert len(terms.page_ids) == 2
    await release(it, context, reserved)


async def test_malformed_and_oversized_messages_are_refused(it: Cluster) -> None:
    context, reserved, key, _ = await negotiated(it)
    with pytest.raises(InvalidRequest, match="ends inside a header"):
        await write(it, key, reserved.capability, b"\0\0\0")
    with pytest.raises(InvalidRequest, match="ends inside a piece"):
        await write(it, key, reserved.capability, struct.pack("<HQI", 0, 0, 100))
    with pytest.raises(InvalidRequest, match="at most 2097152 are read"):
        await write(it, key, reserved.capability, bytes(3 * 1024 * 1024))
    assert refusals(it) == {"malformed": 3}
    await release(it, context, reserved)


async def test_no_bytes_are_taken_before_negotiation_or_after_acceptance(it: Cluster) -> None:
    context, stream = a_context(20), it.stream()
    reserved = await it.reserve(context)
    key = key_of(context, reserved)
    (message,) = transfer_stream.pack([transfer_stream.Piece(0, 0, memoryview(b"x"))])
    with pytest.raises(RequestNotFound, match="no hand-off of request 'r' was negotiated"):
        await write(it, key, reserved.capability, message)
    await it.hand_over(context, reserved)
    late = replace(key, prefill_generation=it.prefill.identity.generation)
    with pytest.raises(TransferFailed, match="is ready and takes no more bytes"):
        await write(it, late, reserved.capability, message)
    await stream.abort(context, reserved.reservation_id)
    await stream.next("finished")


async def test_a_second_prefill_worker_cannot_take_over_a_handoff(it: Cluster) -> None:
    context, reserved, key, terms = await negotiated(it)
    other = replace(key, prefill_generation="g2")
    error = await refusal(negotiate(it, other, reserved.capability, offer(130)))
    assert isinstance(error, DuplicateRequest)
    assert refusals(it) == {"duplicate_request": 1}
    # The first one may repeat its question and gets the same answer.
    assert await negotiate(it, key, reserved.capability, offer(130)) == terms
    await release(it, context, reserved)


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


MANIFESTS: list[tuple[Callable[[Manifest], Manifest], str]] = [
    (lambda m: (*m, m[0]), "row 2 of window twice"),
    (lambda m: (replace(m[0], first_row=0, num_rows=130), *m[1:]), "before the first expected row"),
    (lambda m: (replace(m[0], num_rows=4_000_000_000), *m[1:]), "up to 4000000001; the last"),
    (lambda m: (replace(m[0], num_bytes=1), *m[1:]), "counts 1 bytes for 128 rows of window"),
    (lambda m: (replace(m[0], region="strange"), *m[1:]), "names region strange"),
    (lambda m: m * (MAX_MANIFEST_ENTRIES // len(m) + 1), "entries; at most 65536 are read"),
]


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
    error = await refused_prefill(it.start_prefill(context, reserved))
    assert isinstance(error, TransferFailed)
    assert "row 2 of window twice" in error.message
    failures = "dspark_kv_transfer_failures_total"
    assert figures.figure(it.prefill.metrics.registry, failures, reason="refused") == 1
    assert (await stream.next("failed")).reason == "KV_TRANSFER_FAILED"


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
        error = await refused_prefill(it.start_prefill(context, reserved))
        assert isinstance(error, kind)
        await release(it, a_context(10), reserved)


async def test_a_command_without_content_ends_the_stream_with_its_name(it: Cluster) -> None:
    stream = it.stream()
    await stream.send()
    error = await refusal(stream.call.read())
    assert isinstance(error, InvalidRequest)
    assert "neither admit nor commit nor abort" in error.message
    assert refusals(it) == {"malformed": 1}
