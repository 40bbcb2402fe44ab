"""What travels while the engine still computes, and what a hand-off says of its own time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from common.rpc import convert
from common.transfer.config import TransferConfig
from common.transfer.digest import rows_bytes
from common.transfer.plan import live_rows
from dspark.v1 import prefill_service_pb2
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.figures import figure
from tests.support.handoff_cluster import Cluster, a_context, cluster
from tests.support.small_cache import small_layout
from tests.support.transfer_engines import engine_params, transfer_config
from tests.support.waiting import WAIT_S


@pytest.fixture(params=engine_params("grpc", "nixl"))
def transfer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TransferConfig:
    return transfer_config(request.param, monkeypatch)


def engines() -> tuple[FakeEngine, FakeEngine]:
    layout = small_layout()
    source = FakeEngine(layout, draft_length=5, num_pages=24)
    return source, FakeEngine(layout, draft_length=7, num_pages=32)


def state_bytes(engine: FakeEngine, num_tokens: int) -> int:
    return rows_bytes(
        engine.memory, live_rows(engine.pool.layout, num_tokens, has_drafter_state=True)
    )


def written(it: Cluster, transfer: TransferConfig) -> float:
    registry = it.prefill.metrics.registry
    return figure(registry, "dspark_kv_transfer_bytes_total", engine=str(transfer.engine))


@pytest.mark.parametrize("num_tokens", [1, 130, 300])
async def test_the_whole_state_travels_before_the_first_token_is_sampled(
    transfer: TransferConfig, num_tokens: int
) -> None:
    """The last rows are written by a forward, behind which the engine samples and drafts: time enough for the wire."""
    source, sink = engines()
    async with cluster(loaded(source), loaded(sink), transfer=transfer) as it:
        context, stream = a_context(num_tokens), it.stream()
        reserved = await it.reserve(context)
        await stream.admit(context, reserved)
        source.sampling_permits = threading.Semaphore(0)
        call = it.start_prefill(context, reserved)
        await it.until(lambda: written(it, transfer) == state_bytes(source, num_tokens))
        source.sampling_permits.release()
        events: list[Any] = [event async for event in call]
        done = events[-1].handoff_done

        assert (done.num_bytes, done.num_late_bytes) == (state_bytes(source, num_tokens), 0)
        assert done.wire_s == 0.0, "nothing was written after the first token"
        assert 0.0 < done.handoff_s < 60.0
        await stream.next("admitted")
        await it.until(lambda: len(sink.adopted) == 1)
        assert sink.wrong_rows == []


async def test_a_lease_is_read_whole_and_all_of_its_bytes_count_as_late(
    transfer: TransferConfig,
) -> None:
    source, sink = engines()
    async with cluster(loaded(source), loaded(sink), transfer=transfer) as it:
        context = a_context(200)
        _, done = await it.hand_over(context, await it.reserve(context))
        again = a_context(200, epoch=1)
        reserved = await it.reserve(again)
        request = prefill_service_pb2.HandOffRequest(
            lease_id=done.lease_id,
            context=convert.context_to_pb(again),
            ticket=prefill_service_pb2.DecodeTicket(
                decode_address=it.decode_address,
                reservation_id=reserved.reservation_id,
                capability=reserved.capability,
            ),
        )
        read = (await it.prefill_stub.HandOff(request, timeout=WAIT_S)).done
        assert read.num_bytes == read.num_late_bytes == done.num_bytes
        assert 0.0 < read.wire_s <= read.handoff_s
