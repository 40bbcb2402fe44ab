"""Workers as tests of many files want them: a hand-off's two with fake engines, or scripted ones behind a router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.router import WorkerConfig
from tests.support import handoff_cluster, router_cluster
from tests.support.chat_tokenizer import write_tokenizer
from tests.support.fake_engine import FakeEngine, loaded
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.handoff_pair import Pair, paired
from tests.support.router_cluster import SEQUENCE, router_config
from tests.support.sender import LAYOUT


@pytest.fixture
async def it() -> AsyncIterator[handoff_cluster.Cluster]:
    """A prefill and a decode worker that a test talks to by hand."""
    engines = loaded(FakeEngine(LAYOUT)), loaded(FakeEngine(LAYOUT))
    async with handoff_cluster.cluster(*engines) as running:
        yield running
        await running.require_clean()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """The same with their engines at hand."""
    async with paired(handoff_cluster.PATIENT) as running:
        yield running


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[router_cluster.Cluster]:
    """A router and a worker of each role."""
    config = router_config(write_tokenizer(tmp_path))
    prefills, decodes = [FakePrefill(SEQUENCE)], [FakeDecode(SEQUENCE)]
    async with router_cluster.cluster(config, prefills, decodes) as running:
        yield running


@pytest.fixture
async def pairs(tmp_path: Path) -> AsyncIterator[router_cluster.Cluster]:
    """A router and two workers of each role."""
    config = router_config(write_tokenizer(tmp_path))
    async with router_cluster.cluster(config, *_two_of_each()) as running:
        yield running


@pytest.fixture
async def quick_pairs(tmp_path: Path) -> AsyncIterator[router_cluster.Cluster]:
    """Two workers of each role that are soon given up, and requests that never give up."""
    config = replace(
        router_config(write_tokenizer(tmp_path)),
        workers=WorkerConfig(poll_period_s=0.05, poll_timeout_s=1.0, max_attempts=1000),
    )
    async with router_cluster.cluster(config, *_two_of_each()) as running:
        yield running


def _two_of_each() -> tuple[list[FakePrefill], list[FakeDecode]]:
    prefills = [FakePrefill(SEQUENCE), FakePrefill(SEQUENCE)]
    return prefills, [FakeDecode(SEQUENCE), FakeDecode(SEQUENCE)]
