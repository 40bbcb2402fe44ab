"""How a prefill and a decode worker meet: ahead of requests, for one that comes first, and again after a restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from common.errors import ContractMismatch
from common.kv_cache.layout import CacheLayout, Region
from common.transfer.config import TransferConfig
from dspark.v1 import prefill_service_pb2
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.handoff_cluster import cluster
from tests.support.pairs import (
    GRPC,
    LAYOUT,
    NIXL,
    connect,
    decode_figure,
    figure,
    hand_over,
    meetings,
    workers,
)
from tests.support.refusals import refusal
from tests.support.transfer_engines import engine_params, transfer_config
from tests.support.waiting import WAIT_S


@pytest.fixture(params=engine_params("grpc", "nixl", "nixl-tcp", "mooncake"))
def transfer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TransferConfig:
    return transfer_config(request.param, monkeypatch)


async def test_whoever_was_introduced_meets_nobody_on_a_requests_path(
    transfer: TransferConfig,
) -> None:
    async with cluster(*workers(), transfer=transfer) as it:
        met = await connect(it)
        assert (met.transfer_engine, met.reason) == (transfer.engine, "configured")
        assert (await connect(it)).transfer_engine == transfer.engine
        assert await hand_over(it) == transfer.engine
        assert meetings(it) == {"warm": 1}
        await it.require_clean()


async def test_a_request_that_comes_first_has_its_workers_meet_which_is_counted(
    transfer: TransferConfig,
) -> None:
    async with cluster(*workers(), transfer=transfer) as it:
        for request_id in ("r1", "r2"):
            assert await hand_over(it, request_id) == transfer.engine
        assert meetings(it) == {"cold": 1}


async def test_a_decode_worker_that_was_restarted_on_its_port_is_met_again_and_nobody_notices(
    transfer: TransferConfig,
) -> None:
    async with cluster(*workers(), transfer=transfer) as it:
        await connect(it)
        await hand_over(it, "r1")
        sink = FakeEngine(LAYOUT)
        await it.restart_decode(loaded(sink))
        assert await hand_over(it, "r2") == transfer.engine
        assert meetings(it) == {"warm": 1, "again": 1}
        assert len(sink.adopted) == 1
        assert sink.wrong_rows == []
        # A router that saw the restart says so, which changes nothing any more.
        await connect(it)
        assert meetings(it) == {"warm": 1, "again": 1}
        await it.require_clean()


async def test_a_router_that_sees_a_restart_has_the_two_meet_before_the_next_request() -> None:
    async with cluster(*workers(), transfer=GRPC) as it:
        await connect(it)
        await it.restart_decode(loaded(FakeEngine(LAYOUT)))
        await connect(it)
        await hand_over(it)
        assert meetings(it) == {"warm": 2}


CHANGES: list[tuple[int, Callable[[Region], Region], str]] = [
    (0, lambda region: replace(region, name="windows"), "cache regions differ"),
    (1, lambda region: replace(region, layer_ids=(1, 3)), "csa: layer_ids is"),
    (5, lambda region: replace(region, ratio=64), "hca: ratio is 128 at decode but 64"),
    (0, lambda region: replace(region, row_width=6), "window: row_width is 3 at decode but 6"),
    (0, lambda region: replace(region, dtype="bfloat16"), "window: dtype is float32 at decode"),
    (0, lambda region: replace(region, window_rows=64), "window: window_rows is 128 at decode"),
    (3, lambda region: replace(region, tail_group=8), "csa_tail: tail_group is 4 at decode"),
]


@pytest.mark.parametrize(("index", "change", "words"), CHANGES)
async def test_workers_whose_caches_differ_do_not_meet_and_the_field_is_named(
    index: int, change: Callable[[Region], Region], words: str
) -> None:
    regions = list(LAYOUT.regions)
    regions[index] = change(regions[index])
    theirs = CacheLayout(regions=tuple(regions))
    async with cluster(*workers(theirs), transfer=GRPC) as it:
        error = await refusal(connect(it))
        assert isinstance(error, ContractMismatch)
        assert words in error.message
        assert len(it.prefill.pairs) == 0
        assert figure(it, "refusals_total", reason="contract_mismatch") == 1
        assert decode_figure(it, "refusals_total", reason="contract_mismatch") == 1


async def test_a_decode_worker_that_is_not_there_is_not_met_and_named() -> None:
    async with cluster(*workers(), transfer=GRPC) as it:
        request = prefill_service_pb2.ConnectRequest(decode_address="127.0.0.1:1")
        error = await refusal(it.prefill_stub.Connect(request, timeout=WAIT_S))
        assert "127.0.0.1:1" in error.message


@pytest.mark.parametrize("engine", engine_params("nixl"))
async def test_a_decode_worker_that_describes_its_memory_in_part_is_refused_by_field(
    engine: str,
) -> None:
    async with cluster(*workers(), transfer=NIXL) as it:
        nixl = cast(Any, it.decode._engines.by_name["nixl"])
        nixl.descriptor = replace(nixl.descriptor, region_addresses=(1, 2))
        error = await refusal(connect(it))
        assert isinstance(error, ContractMismatch)
        assert "says where 2 regions begin; the contract has 8" in error.message
