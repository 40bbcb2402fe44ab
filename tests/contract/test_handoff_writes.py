"""Bytes that a decode worker has not asked for, or not now, are refused and leave no trace."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from common.errors import InvalidRequest, RequestNotFound, TransferFailed
from common.rpc import transfer_stream
from tests.support.handoff_cluster import Cluster, a_context
from tests.support.refusals import refusals
from tests.support.sender import key_of, meet, negotiated, release, write


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
