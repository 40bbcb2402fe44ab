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
from torch._C._distributed_c10d import TCPStore

from common.engine.mesh_start import NUM_THREADS
from common.engine.rank_processes import RankProcesses
from common.engine.settings import EngineSettings
from common.parallel.mesh import MeshShape
from tests.support.processes import children

START = timedelta(seconds=240)
"""Far above what starting takes; only a failing test waits so long."""
PAIR = MeshShape(tp=2, ep=2)


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """Where ranks report to, as the first rank opens it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=START)
    store.set(NUM_THREADS, "1")
    yield store


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
    store.wait(["here/0", "here/1"], START)
    store.set("here", "")
    assert ranks.wait() == 1
    reason = ranks.why_lost()
    assert reason is not None and "\n" not in reason
    assert reason.startswith("rank ") and " of 2 (dp 0, tp " in reason
    assert f") failed: no checkpoint folder at {tmp_path / 'nothing'}" in reason


def test_a_killed_rank_is_named_with_its_signal_and_takes_the_others_along(
    store: TCPStore, tmp_path: Path
) -> None:
    """Two of three ranks wait for the first, which never comes."""
    ranks = start(EngineSettings(checkpoint_dir=tmp_path, mesh=MeshShape(tp=3)), store, 1, 2)
    store.wait(["here/1", "here/2"], START)
    victim, other = the_ranks()
    assert ranks.why_lost_now() is None
    os.kill(victim, signal.SIGKILL)
    assert ranks.wait() == 1
    assert ranks.why_lost() == (
        "rank 1 of 3 (dp 0, tp 1) was killed by SIGKILL; the system does this when memory runs out"
    )
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
