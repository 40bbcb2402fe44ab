"""Bytes that change on their way are sent once more, and never taken over."""

from __future__ import annotations

from typing import Any, cast

from common.errors import TransferFailed
from tests.support.handoff_cluster import Cluster, a_context
from tests.support.handoff_pair import Pair
from tests.support.refusals import ended


async def test_altered_bytes_are_sent_once_more(pair: Pair) -> None:
    it, context, stream = pair.it, a_context(200), pair.it.stream()
    Corruption(it, times=1)
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    _, done = await it.hand_over(context, reserved)
    await stream.next("admitted")
    assert it.decode.intake.counts["digest_mismatches"] == 1
    assert done.num_bytes > 0
    await stream.abort(context)
    await stream.skip_to("finished")
    assert pair.sink.wrong_rows == []


async def test_bytes_that_are_altered_twice_fail_the_request_on_both_sides(pair: Pair) -> None:
    it, context, stream = pair.it, a_context(200), pair.it.stream()
    Corruption(it, times=10_000)
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    error = await ended(it.start_prefill(context, reserved))
    assert isinstance(error, TransferFailed)
    assert "arrived altered 2 times" in error.message
    assert (await stream.next("failed")).reason == "KV_TRANSFER_FAILED"
    assert pair.sink.adopted == []
    await it.require_clean()


class Corruption:
    """Flips a bit of the next `times` writes that reach the decode worker's memory."""

    def __init__(self, it: Cluster, times: int) -> None:
        self.left = times
        self._memory = cast(Any, it.decode.intake._memory)
        self._write = self._memory.write
        self._memory.write = self._flip

    def _flip(self, region: int, offset: int, payload: memoryview) -> None:
        if self.left:
            self.left -= 1
            payload = memoryview(bytes([payload[0] ^ 1]) + bytes(payload[1:]))
        self._write(region, offset, payload)
