"""Two nodes of two real ranks each, as far as they can tell: the death of a rank on the one is told by the other."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from common.engine.build import build_engine
from common.engine.memory import Memory
from common.engine.mesh_start import start_node
from common.engine.settings import EngineSettings, Rendezvous
from common.errors import WorkerLost
from common.model.config import ModelConfig
from common.parallel.mesh import MeshShape
from services.cli.ports import free_ports
from tests.support.engine_bench import Wanted, random_tokens
from tests.support.processes import children
from tests.support.thread_mesh import MeshBench
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

pytestmark = pytest.mark.slow

VALUES = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)
KILLED = "rank 3 of 4 (dp 1, tp 1) was killed by SIGKILL; the system does this when memory runs out"


def test_the_death_of_a_rank_on_another_node_is_named_on_both(tmp_path: Path) -> None:
    """Guards a former bug: the first rank was blamed with gloo's own words. Its node's other rank fails in the same
    collective as it does, and is not blamed either."""
    tensors = random_tensors(ModelConfig.from_json(VALUES), seed=1)
    (port,) = free_ports("127.0.0.1", 1)
    first = EngineSettings(
        checkpoint_dir=save_checkpoint(tmp_path / "model", VALUES, tensors),
        mesh=MeshShape(dp=2, tp=2, ep=4),
        rendezvous=Rendezvous(num_nodes=2, address=f"127.0.0.1:{port}"),
        num_slots=4,
        max_context_length=256,
    )
    with contextlib.ExitStack() as ends:
        ranks = start_node(replace(first, rendezvous=replace(first.rendezvous, node_rank=1)))
        ends.callback(ranks.kill)
        (host,) = children(os.getpid())
        loaded = build_engine(first)
        ends.callback(loaded.engine.close)
        memory = Memory(num_pages=loaded.num_pages, num_slots=loaded.num_slots, num_groups=2)
        bench = MeshBench(loaded.engine, memory)
        bench.add(Wanted(prompt=random_tokens(9, seed=1), max_length=60), "r0")
        bench.step()
        os.kill(children(host)[1], signal.SIGKILL)
        with pytest.raises(WorkerLost) as lost:
            bench.drain()
        assert lost.value.message == KILLED
        assert ranks.wait() == 1 and ranks.why_lost() == KILLED
    assert not [rank for host in children(os.getpid()) for rank in children(host)]
