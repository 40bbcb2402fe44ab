"""The processes of a mesh's ranks: what is heard of one that fails or is killed, and that none is left over."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from common.engine.mesh_start import start_mesh
from common.engine.rank_processes import RankProcesses
from common.engine.settings import EngineSettings
from common.errors import CheckpointError, ConfigError
from common.model.config import ModelConfig
from common.parallel.mesh import MeshShape
from tests.support.processes import children
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

START = timedelta(seconds=240)
"""Far above what starting takes; only a failing test waits so long."""
PAIR = MeshShape(tp=2, ep=2)


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """Where ranks report to, as the first rank opens it."""
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=START)


def start(settings: EngineSettings, store: TCPStore, *ranks: int) -> RankProcesses:
    return RankProcesses(settings, ranks, address=f"127.0.0.1:{store.port}", num_threads=1)


def the_ranks() -> list[int]:
    """Processes of ranks that this process has caused."""
    return [rank for host in children(os.getpid()) for rank in children(host)]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_why_a_rank_has_failed_arrives_in_one_line(store: TCPStore, tmp_path: Path) -> None:
    """Both ranks are the host's, meet one another, and find nothing to load."""
    settings = EngineSettings(checkpoint_dir=tmp_path / "nothing", mesh=PAIR)
    ranks = start(settings, store, 0, 1)
    assert ranks.wait() == 1
    reason = ranks.why_lost()
    assert reason is not None and "\n" not in reason
    assert reason.startswith("rank ") and " of 2 (dp 0, tp " in reason
    assert f") failed: no checkpoint folder {tmp_path / 'nothing'}" in reason


@pytest.mark.parametrize(
    ("number", "ending"),
    [
        (signal.SIGKILL, "was killed by SIGKILL; the system does this when memory runs out"),
        (signal.SIGTERM, "was killed by SIGTERM"),
    ],
    ids=["SIGKILL", "SIGTERM"],
)
def test_a_killed_rank_is_named_with_its_signal_and_takes_the_others_along(
    store: TCPStore, tmp_path: Path, number: signal.Signals, ending: str
) -> None:
    """Two of three ranks wait for the first, which never comes."""
    ranks = start(EngineSettings(checkpoint_dir=tmp_path, mesh=MeshShape(tp=3)), store, 1, 2)
    store.wait(["here/1", "here/2"], START)
    victim, other = the_ranks()
    assert ranks.why_lost_now() is None
    os.kill(victim, number)
    assert ranks.wait() == 1
    assert ranks.why_lost() == f"rank 1 of 3 (dp 0, tp 1) {ending}"
    assert ranks.why_lost_now() == ranks.why_lost(), "the second one's end is no news"
    assert not is_alive(victim) and not is_alive(other)


def test_ranks_that_are_told_to_end_are_no_news(
    store: TCPStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a former bug: whoever ended a mesh read that the system had killed a rank for want of memory."""
    ranks = start(EngineSettings(checkpoint_dir=tmp_path, mesh=PAIR), store, 1)
    store.wait(["here/1"], START)
    (pid,) = the_ranks()
    with caplog.at_level(logging.INFO):
        ranks.kill()
        assert ranks.why_lost() is None
    assert not caplog.records
    assert not is_alive(pid)


def test_a_host_that_cannot_start_is_noticed(store: TCPStore, tmp_path: Path) -> None:
    """Guards a former bug: the first rank waited for the others until its time to start was over."""
    with mock.patch.object(sys, "executable", "/bin/false"):
        ranks = start(EngineSettings(checkpoint_dir=tmp_path, mesh=PAIR), store, 1)
    assert ranks.wait() == 1
    reason = "the process that starts this node's ranks ended with exit code 1"
    assert ranks.why_lost() == reason


# The first rank's side --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)
    tensors = random_tensors(ModelConfig.from_json(values), seed=1)
    return save_checkpoint(tmp_path_factory.mktemp("mesh") / "model", values, tensors)


def test_a_mesh_that_does_not_divide_the_model_is_refused_and_leaves_nothing(
    checkpoint: Path,
) -> None:
    settings = EngineSettings(checkpoint_dir=checkpoint, mesh=MeshShape(tp=4))
    message = r"o_groups \(2\) is not divisible by tp \(4\)"
    with pytest.raises(ConfigError, match=message):
        start_mesh(settings)
    assert not dist.is_initialized() and not the_ranks()


def test_slots_that_groups_cannot_share_are_refused_with_a_number_that_they_can(
    checkpoint: Path,
) -> None:
    settings = EngineSettings(checkpoint_dir=checkpoint, mesh=MeshShape(dp=2), num_slots=5)
    with pytest.raises(ConfigError, match=r"num_slots \(5\) is not divisible by dp \(2\); give 4"):
        start_mesh(settings)
    assert not the_ranks()


def test_a_missing_checkpoint_ends_a_start_at_once(tmp_path: Path) -> None:
    settings = EngineSettings(checkpoint_dir=tmp_path / "nothing", mesh=PAIR)
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        start_mesh(settings)
    assert not dist.is_initialized() and not the_ranks()
