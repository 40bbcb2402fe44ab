"""What a decode worker grants is looked at before a byte is written to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import grpc.aio
import pytest

from common.errors import ContractMismatch
from common.rpc.status import error_of_call
from common.transfer.handoff import HandoffTerms
from common.transfer.plan import RegionMemory
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.figures import figure
from tests.support.handoff_cluster import Cluster, a_context, cluster
from tests.support.small_cache import small_layout

LAYOUT = small_layout()


def workers() -> tuple[Any, Any]:
    return loaded(FakeEngine(LAYOUT)), loaded(FakeEngine(LAYOUT))


async def refused(it: Cluster) -> ContractMismatch:
    """How a prefill ends whose hand-off prefill itself refuses to begin."""
    context, stream = a_context(300), it.stream()
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in it.start_prefill(context, reserved)]
    error = error_of_call(caught.value, peer="prefill")
    assert isinstance(error, ContractMismatch)
    assert it.decode.intake.counts["received_bytes"] == 0
    metrics = it.prefill.metrics.registry
    assert figure(metrics, "dspark_kv_refusals_total", reason="contract_mismatch") == 1
    assert figure(metrics, "dspark_kv_transfer_failures_total", reason="refused") == 1
    await stream.abort(context, reserved.reservation_id)
    return error


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (lambda t: replace(t, page_ids=t.page_ids[:-1]), "page_ids", "granted 2 pages"),
        (lambda t: replace(t, page_ids=(t.page_ids[0],) * 3), "page_ids", "twice"),
        (lambda t: replace(t, page_ids=(*t.page_ids[:-1], 16)), "page_ids", "page 16; its region"),
        (lambda t: replace(t, slot=4), "slot", "slot 4; its region window has 4"),
    ],
)
async def test_a_grant_that_cannot_be_is_refused_by_field_before_a_byte_is_written(
    change: Callable[[HandoffTerms], HandoffTerms], field: str, words: str
) -> None:
    """A page that is granted twice once ended as state that arrived altered, after everything had travelled twice."""
    async with cluster(*workers()) as it:
        intake = cast(Any, it.decode.intake)
        negotiate = intake.negotiate
        intake.negotiate = lambda *asked: change(negotiate(*asked))
        error = await refused(it)
        assert error.metadata["field"] == field
        assert words in error.message
        await it.require_clean()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("block_stride_bytes", lambda m: m.block_stride_bytes // 2),
        ("layer_stride_bytes", lambda m: m.block_stride_bytes - 1),
        ("total_bytes", lambda m: m.total_bytes - 1),
    ],
)
async def test_memory_whose_blocks_overlap_or_end_outside_is_refused_by_field_at_the_meeting(
    field: str, change: Callable[[RegionMemory], int]
) -> None:
    async with cluster(*workers()) as it:
        meetings = cast(Any, it.decode.meetings)
        meet = meetings.meet

        def lies(introduction: Any) -> Any:
            answer = meet(introduction)
            first, *rest = answer.memory
            changes: dict[str, Any] = {field: change(first)}
            return replace(answer, memory=(replace(first, **changes), *rest))

        meetings.meet = lies
        error = await refused(it)
        assert error.metadata == {"region": "window", "field": field}
        assert len(it.prefill.pairs) == 0
        await it.require_clean()
