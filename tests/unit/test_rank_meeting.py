"""How ranks come together, over a real store: nobody goes on alone, and the first rank hears what kept another from coming."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from common.engine import mesh_start
from common.engine.mesh_start import Meet, run_follower, start_mesh
from common.engine.settings import EngineSettings, Rendezvous
from common.errors import CheckpointError, ServingError, WorkerLost
from common.parallel.mesh import MeshShape
from tests.support.tiny_checkpoint import config_json

START_S = 60.0
"""Far above what a meeting of threads takes."""


class Stopped(Exception):
    """A rank has come as far as a test wants it to."""


class Ranks:
    """Stands for the processes of the other ranks, which are threads here."""

    def __init__(
        self, settings: EngineSettings, ranks: range, *, address: str, num_threads: int
    ) -> None:
        self._threads = [
            threading.Thread(target=self._run, args=(settings, rank, address)) for rank in ranks
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _run(settings: EngineSettings, rank: int, address: str) -> None:
        try:
            run_follower(settings, rank=rank, local_rank=rank, address=address)
        except (Stopped, ServingError):
            return

    def why_lost_now(self) -> str | None:
        """Nothing is ever heard: these ranks are another node's."""
        return None

    why_lost = why_lost_now

    def kill(self) -> None:
        for thread in self._threads:
            thread.join(START_S)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    with mock.patch.object(mesh_start, "RankProcesses", Ranks):
        yield
    torch.set_num_threads(before)


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    (tmp_path / "config.json").write_text(json.dumps(config_json()), encoding="utf-8")
    return EngineSettings(
        checkpoint_dir=tmp_path,
        num_slots=3,
        mesh=MeshShape(dp=3),
        rendezvous=Rendezvous(start_timeout_s=START_S),
    )


def test_no_rank_goes_on_before_the_last_one_has_come(settings: EngineSettings) -> None:
    """Guards a former bug: ranks waited for a slower node, or a slower disk, no longer than for a step."""
    went_on = threading.Event()

    def join(_: EngineSettings, store: TCPStore, meet: Meet, *, rank: int = 0, **__: Any) -> None:
        if rank == 2:
            store.wait(["loaded/1"])
            assert not went_on.wait(0.1), "rank 1 went on without us"
        meet("loaded")
        if rank == 1:
            went_on.set()
        raise Stopped

    with mock.patch.object(mesh_start, "_join", join), pytest.raises(Stopped):
        start_mesh(settings)
    assert went_on.is_set()


def test_ranks_compute_with_as_many_threads_as_the_first_whatever_their_node_has(
    settings: EngineSettings,
) -> None:
    """Guards a former bug: each node divided its own cores, and replicas on unlike nodes differed in their last bits."""
    used: list[int] = []

    def set_num_threads(num_threads: int) -> None:
        used.append(num_threads)

    def join(_: EngineSettings, store: TCPStore, meet: Meet, **__: Any) -> None:
        meet("here")
        raise Stopped

    with (
        mock.patch.object(torch, "get_num_threads", side_effect=[7, 2, 2]) as asked,
        mock.patch.object(torch, "set_num_threads", set_num_threads),
        mock.patch.object(mesh_start, "_join", join),
        pytest.raises(Stopped),
    ):
        start_mesh(settings)
    assert used == [2, 2, 2], "seven threads, shared by three"
    assert asked.call_count == 1, "no other rank looks at its own node"


def test_what_keeps_a_rank_of_another_node_from_starting_is_told_by_the_first(
    settings: EngineSettings,
) -> None:
    """Guards a former bug: the first rank waited for it until its time to start was over."""

    def join(_: EngineSettings, store: TCPStore, meet: Meet, *, rank: int = 0, **__: Any) -> None:
        if rank:
            raise CheckpointError("layers.3.attn.wq_a.weight is missing\nand more of it")
        meet("loaded")

    settings = replace(settings, mesh=MeshShape(dp=2), num_slots=2)
    with mock.patch.object(mesh_start, "_join", join), pytest.raises(WorkerLost) as lost:
        start_mesh(settings)
    assert lost.value.message == (
        "rank 1 of 2 (dp 1, tp 0) failed: layers.3.attn.wq_a.weight is missing"
    )
