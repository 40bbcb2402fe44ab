"""The router has workers meet before a request needs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.errors import TransferFailed
from services.router import introductions
from tests.support.chat_tokenizer import write_tokenizer
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.router_cluster import Cluster, cluster, router_config

SEQUENCE = list(range(40, 140))


@pytest.fixture
async def pairs(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two workers of each role."""
    prefills = [FakePrefill(SEQUENCE), FakePrefill(SEQUENCE)]
    decodes = [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
    decodes[1].generation = "decode-2"
    config = router_config(write_tokenizer(tmp_path))
    async with cluster(config, prefills, decodes) as running:
        yield running


def met(prefill: FakePrefill) -> list[str]:
    return sorted(request.decode_generation for request in prefill.connects)


async def test_every_prefill_worker_meets_every_decode_worker_once(pairs: Cluster) -> None:
    for prefill in pairs.prefills:
        await prefill.seen.until(lambda p=prefill: len(p.connects) == 2)  # type: ignore[misc]
        assert met(prefill) == ["decode-1", "decode-2"]
        addresses = {request.decode_address for request in prefill.connects}
        assert addresses == set(prefill.decodes)


async def test_a_restarted_worker_is_met_again_and_the_others_are_not(pairs: Cluster) -> None:
    for prefill in pairs.prefills:
        await prefill.seen.until(lambda p=prefill: len(p.connects) == 2)  # type: ignore[misc]
    pairs.decodes[1].generation = "decode-3"
    for prefill in pairs.prefills:
        await prefill.seen.until(lambda p=prefill: len(p.connects) == 3)  # type: ignore[misc]
        assert met(prefill) == ["decode-1", "decode-2", "decode-3"]
    pairs.prefill.generation = "prefill-2"
    await pairs.prefill.seen.until(lambda: len(pairs.prefill.connects) == 5)
    assert len(pairs.prefills[1].connects) == 3


async def test_an_introduction_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(introductions, "FIRST_RETRY_S", 0.01)
    prefill = FakePrefill(SEQUENCE)
    prefill.connect_failures = [TransferFailed("scripted"), TransferFailed("scripted")]
    config = router_config(write_tokenizer(tmp_path))
    async with cluster(config, [prefill], [FakeDecode(SEQUENCE)]):
        await prefill.seen.until(lambda: len(prefill.connects) == 3)
        async with asyncio.timeout(1):
            await prefill.seen.until(lambda: not prefill.connect_failures)
