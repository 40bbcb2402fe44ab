"""A sender whose cache, model, engine or terms do not fit a decode worker is refused by the name of what differs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from common.errors import ContractMismatch, PairUnknown, ServingError
from common.kv_cache.layout import CacheLayout
from tests.support.fake_engine import FINGERPRINT, FakeEngine, loaded
from tests.support.handoff_cluster import Cluster, a_context, cluster
from tests.support.refusals import ended, refusal, refusals
from tests.support.sender import LAYOUT, key_of, meet, negotiate, offer, release

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
        error = await ended(it.start_prefill(context, reserved))
        assert isinstance(error, ContractMismatch)
        assert "model fingerprint" in error.message
        await it.require_clean()
