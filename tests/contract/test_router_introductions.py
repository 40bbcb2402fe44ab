"""The router has workers meet before a request needs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import TransferFailed
from services.cli.ports import free_ports
from services.router import introductions, serve
from tests.support.chat_tokenizer import write_tokenizer
from tests.support.fake_workers import FakeDecode, FakePrefill, serving
from tests.support.http import get
from tests.support.router_cluster import (
    SEQUENCE,
    Cluster,
    cluster,
    router_config,
)


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
        assert not prefill.connect_failures


async def test_a_router_is_ready_once_two_of_its_workers_have_written_to_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers that are ready each by itself may not reach each other's memory, and then nothing can be served."""
    monkeypatch.setattr(introductions, "FIRST_RETRY_S", 0.01)
    (admin_port,) = free_ports("127.0.0.1", 1)
    prefill, decode = FakePrefill(SEQUENCE), FakeDecode(SEQUENCE)
    prefill.refuses_to_connect = TransferFailed("no bytes arrived")
    config = replace(router_config(write_tokenizer(tmp_path)), admin_port=admin_port)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    async with serving(prefill) as prefill_server, serving(decode) as decode_server:
        config = replace(
            config,
            prefill_addresses=(prefill_server.address,),
            decode_addresses=(decode_server.address,),
        )
        router = asyncio.create_task(serve(config, ready=ready.set_result, stop=stop))
        await prefill.seen.until(lambda: len(prefill.connects) == 2)
        status, why = await asyncio.to_thread(get, admin_port, "/readyz")
        assert status == 503
        assert "no prefill worker has met a decode worker yet" in why
        assert f"{prefill_server.address} and {decode_server.address}: no bytes arrived" in why
        assert await asyncio.to_thread(get, admin_port, "/livez") == (200, "ok\n")
        assert await asyncio.to_thread(get, admin_port, "/startupz") == (200, "ok\n")
        assert not ready.done()
        prefill.refuses_to_connect = None
        await asyncio.wait_for(ready, 10)
        assert await asyncio.to_thread(get, admin_port, "/readyz") == (200, "ok\n")
        # Another process at the same address has met nobody.
        prefill.refuses_to_connect = TransferFailed("no bytes arrived")
        num_before = len(prefill.connects)
        prefill.generation = "prefill-2"
        await prefill.seen.until(lambda: len(prefill.connects) >= num_before + 2)
        assert (await asyncio.to_thread(get, admin_port, "/readyz"))[0] == 503
        stop.set()
        await asyncio.wait_for(router, 10)


async def test_a_decode_worker_that_computes_prompts_needs_no_pair(tmp_path: Path) -> None:
    decode = FakeDecode(SEQUENCE)
    decode.computes_prompt = True
    async with cluster(router_config(write_tokenizer(tmp_path)), [], [decode]) as running:
        assert running.address
