"""How a prefill and a decode worker meet: ahead of requests, for one that comes first, and again after a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import grpc.aio
import pytest

from common.errors import ConfigError, ContractMismatch, TransferFailed
from common.kv_cache.layout import CacheLayout, Region
from common.rpc.status import error_of_call
from common.transfer import engines
from common.transfer.config import TransferConfig
from dspark.v1 import prefill_service_pb2
from services.prefill import pairs
from tests.support import figures
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.handoff_cluster import Cluster, a_context, cluster
from tests.support.refusals import refusal
from tests.support.small_cache import small_layout
from tests.support.transfer_engines import engine_params, transfer_config
from tests.support.waiting import WAIT_S

LAYOUT = small_layout()
NIXL = TransferConfig(engine="nixl", connect_timeout_s=WAIT_S)
GRPC = TransferConfig(engine="grpc")
AUTO = TransferConfig(engine="auto", connect_timeout_s=WAIT_S)


def workers(layout: CacheLayout = LAYOUT) -> tuple[Any, Any]:
    return loaded(FakeEngine(layout)), loaded(FakeEngine(LAYOUT))


@pytest.fixture(params=engine_params("grpc", "nixl", "nixl-tcp", "mooncake"))
def transfer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TransferConfig:
    return transfer_config(request.param, monkeypatch)


async def connect(it: Cluster, generation: str | None = None) -> Any:
    """As a router does."""
    request = prefill_service_pb2.ConnectRequest(
        decode_address=it.decode_address,
        decode_generation=it.decode.identity.generation if generation is None else generation,
    )
    return await it.prefill_stub.Connect(request, timeout=WAIT_S)


async def hand_over(it: Cluster, request_id: str = "r") -> str:
    """The engine by which a request's state went."""
    context, stream = a_context(140, request_id=request_id), it.stream()
    reserved = await it.reserve(context)
    await stream.admit(context, reserved)
    _, done = await it.hand_over(context, reserved)
    await stream.next("admitted")
    await stream.abort(context)
    await stream.skip_to("finished")
    return str(done.transfer_engine)


def figure(it: Cluster, name: str, **labels: str) -> float:
    return figures.figure(it.prefill.metrics.registry, f"dspark_kv_{name}", **labels)


def decode_figure(it: Cluster, name: str, **labels: str) -> float:
    return figures.figure(it.decode.metrics.registry, f"dspark_kv_{name}", **labels)


def meetings(it: Cluster) -> dict[str, float]:
    kinds = ("warm", "cold", "again")
    counts = {kind: figure(it, "pair_meetings_total", kind=kind) for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}


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
async def test_a_slower_engine_than_configured_is_a_warning_and_a_figure(
    engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(*workers(), transfer=NIXL, decode_transfer=GRPC) as it:
        with caplog.at_level(logging.WARNING):
            met = await connect(it)
        assert met.transfer_engine == "grpc"
        assert met.reason == f"no nixl: {it.decode_address} has grpc"
        assert f"state goes to {it.decode_address} only by grpc: no nixl" in caplog.text
        assert figure(it, "transport_fallbacks_total", wanted="nixl") == 1
        labels = {"peer": it.decode_address, "engine": "grpc", "reason": met.reason}
        assert figure(it, "transport_info", **labels) == 1
        assert await hand_over(it) == "grpc"


@pytest.mark.parametrize(
    ("engine", "prefill_transfer"),
    [
        pytest.param(*engine.values, prefill, marks=engine.marks)
        for engine, prefill in zip(engine_params("mooncake", "nixl"), (AUTO, GRPC), strict=True)
    ],
)
async def test_a_slower_engine_than_decode_was_told_to_use_is_decodes_warning_and_figure(
    engine: str,
    prefill_transfer: TransferConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Prefill gets what it wants here, so only decode can say that its own wish was not followed."""
    told = transfer_config(engine, monkeypatch)
    async with cluster(*workers(), transfer=prefill_transfer, decode_transfer=told) as it:
        with caplog.at_level(logging.WARNING):
            assert (await connect(it)).transfer_engine == "grpc"
        offered = ", ".join(it.prefill.pairs.engines.names)
        reason = f"no {engine}: {it.prefill_address} offers {offered}"
        assert f"writes here only by grpc: {reason}" in caplog.text
        assert decode_figure(it, "transport_fallbacks_total", wanted=engine) == 1
        labels = {"peer": it.prefill_address, "engine": "grpc", "reason": reason}
        assert decode_figure(it, "transport_info", **labels) == 1
        # Prefill got what it was told to use.
        assert figure(it, "transport_fallbacks_total") == 0


async def test_an_engine_that_decode_was_told_to_use_and_does_not_have_is_said_at_every_meeting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def is_not_here(*_: Any) -> Any:
        raise ConfigError("the library is not here")

    monkeypatch.setattr(engines, "NixlTransferEngine", is_not_here)
    is_not_here.name = "nixl"  # type: ignore[attr-defined]
    async with cluster(*workers(), transfer=GRPC, decode_transfer=NIXL) as it:
        with caplog.at_level(logging.WARNING):
            assert (await connect(it)).transfer_engine == "grpc"
        assert "writes here only by grpc: no nixl: the library is not here" in caplog.text
        assert decode_figure(it, "transport_fallbacks_total", wanted="nixl") == 1


async def test_what_decode_has_no_opinion_about_is_no_fallback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(*workers(), transfer=GRPC, decode_transfer=AUTO) as it:
        with caplog.at_level(logging.WARNING):
            assert (await connect(it)).transfer_engine == "grpc"
        assert "only by" not in caplog.text
        assert decode_figure(it, "transport_fallbacks_total") == 0


@pytest.mark.parametrize("engine", engine_params("nixl"))
async def test_an_engine_that_does_not_reach_its_peer_is_left_for_a_slower_one_and_tried_again(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "RETRY_S", 0.01)
    async with cluster(*workers(), transfer=NIXL) as it:
        nixl = cast(Any, it.prefill.pairs.engines.by_name["nixl"])
        reaches = nixl.connect

        async def fails(*arguments: Any, **named: Any) -> None:
            raise TransferFailed("no way through")

        nixl.connect = fails
        met = await connect(it)
        assert (met.transfer_engine, met.reason) == ("grpc", "no nixl: no way through")
        nixl.connect = reaches
        # Nobody asks for it.
        details = f"transfer_engine {it.decode_address}"
        await it.until(lambda: it.prefill.pairs.details().get(details) == "nixl (configured)")
        assert figure(it, "pair_meetings_total", kind="again") >= 1
        assert await hand_over(it) == "nixl"


@pytest.mark.parametrize("engine", engine_params("nixl"))
async def test_a_failed_write_ends_its_request_and_the_pair_is_met_again(engine: str) -> None:
    async with cluster(*workers(), transfer=NIXL) as it:
        await connect(it)
        nixl = cast(Any, it.prefill.pairs.engines.by_name["nixl"])
        nixl._peers.clear()  # as if NIXL had said that the peer is disconnected
        context = a_context(140)
        reserved = await it.reserve(context)
        call = it.start_prefill(context, reserved)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in call]
        error = error_of_call(caught.value, peer="prefill")
        assert isinstance(error, TransferFailed)
        await it.until(lambda: len(it.prefill.pairs) == 1)
        assert await hand_over(it, "r2") == "nixl"
        assert figure(it, "transfer_failures_total", reason="write_failed") == 1
        await it.require_clean()


async def test_what_was_chosen_and_why_is_told_to_whoever_asks_logged_and_a_figure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(*workers(), transfer=AUTO) as it:
        with caplog.at_level(logging.INFO):
            met = await connect(it)
        said = f"state goes to {it.decode_address} by {met.transfer_engine}: {met.reason}"
        assert said in caplog.messages
        labels = {"peer": it.decode_address, "engine": met.transfer_engine, "reason": met.reason}
        assert figure(it, "transport_info", **labels) == 1
        info = await it.prefill_stub.GetWorkerInfo(
            prefill_service_pb2.PrefillServiceGetWorkerInfoRequest(), timeout=WAIT_S
        )
        told = info.info.details[f"transfer_engine {it.decode_address}"]
        assert told == f"{met.transfer_engine} ({met.reason})"
        assert info.info.transfer_engines[0] == met.transfer_engine


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
