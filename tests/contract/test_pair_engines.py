"""Which engine two workers choose when they meet, and who hears of it when that is not the one that was wanted."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from common.errors import ConfigError, TransferFailed
from common.transfer import engines
from common.transfer.config import TransferConfig
from dspark.v1 import prefill_service_pb2
from services.prefill import pairs
from tests.support.handoff_cluster import cluster
from tests.support.pairs import (
    AUTO,
    GRPC,
    NIXL,
    connect,
    decode_figure,
    figure,
    hand_over,
    workers,
)
from tests.support.transfer_engines import engine_params, transfer_config
from tests.support.waiting import WAIT_S


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
