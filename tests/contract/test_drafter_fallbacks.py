"""Workers with other drafters: the target's rows travel, the drafter's stay behind, and everybody is told."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc.aio
import pytest

from common.errors import ContractMismatch
from common.kv_cache.layout import CacheLayout
from common.rpc.status import error_of_call
from common.transfer.config import TransferConfig
from dspark.v1 import decode_service_pb2, prefill_service_pb2
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.figures import figure
from tests.support.handoff_cluster import Cluster, a_context, cluster
from tests.support.small_cache import small_layout
from tests.support.transfer_engines import engine_params, transfer_config
from tests.support.waiting import WAIT_S

LAYOUT = small_layout()
NO_DRAFTER = LAYOUT.target
SHALLOW = CacheLayout(regions=(*LAYOUT.regions[:-1], replace(LAYOUT.regions[-1], layer_ids=(0, 1))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Two workers and what is said of them."""

    prefill: Callable[[], FakeEngine]
    decode: Callable[[], FakeEngine]
    why: str
    prefill_drafter: str = "drafter"
    is_loss: bool = True
    """Whether decode has a drafter, which then misses its state."""


def with_drafter() -> FakeEngine:
    return FakeEngine(LAYOUT)


def without() -> FakeEngine:
    return FakeEngine(NO_DRAFTER, draft_length=0)


PAIRINGS = {
    "none at prefill": Pairing(prefill=without, decode=with_drafter, why="prefill has no drafter"),
    "none at decode": Pairing(
        prefill=with_drafter, decode=without, why="decode has no drafter", is_loss=False
    ),
    "other depth": Pairing(
        prefill=lambda: FakeEngine(SHALLOW),
        decode=with_drafter,
        why="cache region drafter: layer_ids is (0, 1, 2) at decode but (0, 1) at prefill",
    ),
    "other weights": Pairing(
        prefill=with_drafter,
        decode=with_drafter,
        prefill_drafter="another",
        why="drafter fingerprint is drafter at decode but another at prefill",
    ),
}


@pytest.fixture(params=engine_params("grpc", "nixl", "nixl-tcp", "mooncake"))
def transfer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TransferConfig:
    return transfer_config(request.param, monkeypatch)


async def told(it: Cluster) -> list[dict[str, str]]:
    """What each worker says about drafter state to whoever asks it."""
    prefill = await it.prefill_stub.GetWorkerInfo(
        prefill_service_pb2.PrefillServiceGetWorkerInfoRequest(), timeout=WAIT_S
    )
    decode = await it.decode_stub.GetWorkerInfo(
        decode_service_pb2.DecodeServiceGetWorkerInfoRequest(), timeout=WAIT_S
    )
    return [
        {name: text for name, text in answer.info.details.items() if "drafter" in name}
        for answer in (prefill, decode)
    ]


def has_adopted(sink: FakeEngine, count: int) -> bool:
    return len(sink.adopted) == count


@pytest.mark.parametrize("name", PAIRINGS)
async def test_the_targets_rows_go_on_without_the_drafters_and_it_is_said(
    transfer: TransferConfig, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    pairing = PAIRINGS[name]
    source, sink = pairing.prefill(), pairing.decode()
    prefill = loaded(source, drafter_fingerprint=pairing.prefill_drafter)
    caplog.set_level(logging.WARNING)
    async with cluster(prefill, loaded(sink), transfer=transfer) as it:
        stream = it.stream()
        for num_tokens in (1, 127, 128, 129, 300):
            num_before = len(sink.adopted)
            context = a_context(num_tokens, request_id=f"r{num_tokens}", first=num_tokens)
            reserved = await it.reserve(context)
            await stream.admit(context, reserved)
            _, done = await it.hand_over(context, reserved)
            assert done.transfer_engine == transfer.engine
            admitted = await stream.next("admitted")
            fallback = f"the prefill worker sent no drafter state: {pairing.why}"
            assert admitted.drafter_fallback == (fallback if pairing.is_loss else "")
            await it.until(functools.partial(has_adopted, sink, num_before + 1))
            assert sink.adopted[-1].drafter_valid_from == num_tokens
            assert sink.num_drafts[-1] == 0
            assert sink.wrong_rows == []
            await stream.commit(context, 0, num_tokens + 1, finish=True)
            await stream.skip_to("finished")
        counted = figure(it.decode.metrics.registry, "dspark_spec_drafter_fallbacks_total")
        assert counted == (5 if pairing.is_loss else 0)
        assert await told(it) == [
            {f"drafter_state {it.decode_address}": f"not sent: {pairing.why}"},
            {f"drafter_state {it.prefill_address}": f"not received: {pairing.why}"},
        ]
        assert f"no drafter state goes to {it.decode_address}: {pairing.why}" in caplog.text
        said = f"prefill worker {it.prefill_address} sends no drafter state: {pairing.why}"
        assert said in caplog.text
        assert figure(it.decode.metrics.registry, "dspark_kv_refusals_total") == 0
        await it.require_clean()


async def test_drafters_that_are_alike_are_not_spoken_of(transfer: TransferConfig) -> None:
    """Without this, everything above could be true of every pair."""
    sink = with_drafter()
    async with cluster(loaded(with_drafter()), loaded(sink), transfer=transfer) as it:
        context, stream = a_context(130), it.stream()
        reserved = await it.reserve(context)
        await stream.admit(context, reserved)
        await it.hand_over(context, reserved)
        assert (await stream.next("admitted")).drafter_fallback == ""
        await it.until(lambda: len(sink.adopted) == 1)
        assert sink.adopted[0].drafter_valid_from == 0
        assert await told(it) == [{}, {}]
        await stream.abort(context)


@pytest.mark.parametrize("name", PAIRINGS)
async def test_altered_rows_of_the_target_are_noticed_without_the_drafters_too(name: str) -> None:
    pairing = PAIRINGS[name]
    sink = pairing.decode()
    prefill = loaded(pairing.prefill(), drafter_fingerprint=pairing.prefill_drafter)
    async with cluster(prefill, loaded(sink)) as it:
        intake = cast(Any, it.decode.intake)
        complete, results = intake.complete, []

        async def altered_once(key: Any, capability: Any, result: Any) -> Any:
            results.append(result)
            if len(results) == 1:
                result = replace(result, digests=(*result.digests[:-2], bytes(16), bytes(16)))
            return await complete(key, capability, result)

        intake.complete = altered_once
        context, stream = a_context(130), it.stream()
        reserved = await it.reserve(context)
        await stream.admit(context, reserved)
        await it.hand_over(context, reserved)
        await stream.next("admitted")
        assert len(results) == 2
        counted = "dspark_kv_digest_mismatches_total"
        assert figure(it.decode.metrics.registry, counted, region="hca_tail") == 1
        assert sink.wrong_rows == []
        await stream.abort(context)


@pytest.mark.parametrize("name", PAIRINGS)
async def test_a_target_that_differs_is_refused_whatever_the_drafters_are(name: str) -> None:
    pairing = PAIRINGS[name]
    first, *rest = pairing.prefill().pool.layout.regions
    other = CacheLayout(regions=(replace(first, row_width=6), *rest))
    async with cluster(loaded(FakeEngine(other)), loaded(pairing.decode())) as it:
        request = prefill_service_pb2.ConnectRequest(decode_address=it.decode_address)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.prefill_stub.Connect(request, timeout=WAIT_S)
        error = error_of_call(caught.value, peer="prefill")
        assert isinstance(error, ContractMismatch)
        assert error.metadata == {"region": "window", "field": "row_width"}
