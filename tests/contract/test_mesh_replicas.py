"""Four real ranks, one of which loses a bit that changes no token: the step after it names rank, region, layer and row."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from common.engine.build import build_engine
from common.engine.memory import Memory
from common.engine.settings import EngineSettings
from common.errors import ReplicasDiffer, WorkerLost
from common.model.config import ModelConfig
from common.parallel.mesh import MeshShape
from tests.support.corrupted_rank import Bit, host_that_corrupts
from tests.support.engine_bench import Wanted, random_tokens
from tests.support.processes import children
from tests.support.thread_mesh import MeshBench
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

pytestmark = pytest.mark.slow

VALUES = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63, o_groups=4)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    tensors = random_tensors(ModelConfig.from_json(VALUES), seed=1)
    folder = save_checkpoint(tmp_path_factory.mktemp("mesh") / "model", VALUES, tensors)
    return EngineSettings(
        checkpoint_dir=folder, num_slots=4, max_context_length=256, checks_replicas=True
    )


@contextmanager
def mesh_with(bit: Bit, settings: EngineSettings, folder: Path) -> Iterator[MeshBench]:
    """A mesh with one request in each group, until the step before the one that finds the bit."""
    host = host_that_corrupts(bit, sys.executable, folder / "host")
    with mock.patch.object(sys, "executable", host):
        loaded = build_engine(settings)
    memory = Memory(
        num_pages=loaded.num_pages, num_slots=loaded.num_slots, num_groups=settings.mesh.dp
    )
    bench = MeshBench(loaded.engine, memory)
    try:
        for group in range(settings.mesh.dp):
            prompt = random_tokens(9, seed=group)
            assert bench.add(Wanted(prompt=prompt, max_length=60), f"r{group}").group == group
        for _ in range(bit.num_steps):
            bench.step()
        yield bench
    finally:
        loaded.engine.close()
    assert not [rank for host in children(os.getpid()) for rank in children(host)]


def test_one_of_four_is_known_to_be_wrong(settings: EngineSettings, tmp_path: Path) -> None:
    settings = replace(settings, mesh=MeshShape(tp=4, ep=4))
    bit = Bit(rank=2, region="window", layer=1, block=0, row=5, num_steps=2)
    with mesh_with(bit, settings, tmp_path) as bench, pytest.raises(ReplicasDiffer) as raised:
        bench.step()
    assert raised.value.metadata == {"ranks": "2", "region": "window", "layer": "1", "row": "5"}
    said = str(raised.value)
    assert said.startswith("rank 2 of 4 (dp 0, tp 2) differs from the rest of its group after ")
    assert "tokens of request r0: region window, layer 1, row 5 is the first of 1 unequal" in said
    assert "restart it" in said and "\n" not in said


def test_what_ranks_of_another_group_find_is_told_by_the_first(
    settings: EngineSettings, tmp_path: Path
) -> None:
    """Of two nobody knows which is wrong."""
    settings = replace(settings, mesh=MeshShape(dp=2, tp=2, ep=4))
    bit = Bit(rank=3, region="drafter", layer=0, block=0, row=4, num_steps=2)
    with mesh_with(bit, settings, tmp_path) as bench, pytest.raises(WorkerLost) as raised:
        bench.step()
    said = str(raised.value)
    assert " failed: rank 2 of 4 (dp 1, tp 0) and rank 3 of 4 (dp 1, tp 1) hold unlike rows" in said
    assert "tokens of request r1: region drafter, layer " in said and ", row 4 is the first" in said
    assert "restart it" in said and "\n" not in said
