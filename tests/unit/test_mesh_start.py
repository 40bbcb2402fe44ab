"""What is wrong with a mesh is said before any of its processes is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from common.engine import mesh_start
from common.engine.mesh_start import start_mesh
from common.engine.settings import EngineSettings, Rendezvous
from common.errors import CheckpointError, ConfigError
from common.parallel.mesh import MeshShape
from common.parallel.shard import Shard
from tests.support.tiny_checkpoint import config_json


@pytest.fixture(autouse=True)
def nothing_starts() -> Iterator[None]:
    with (
        mock.patch.object(mesh_start, "RankProcesses", side_effect=AssertionError("started")),
        mock.patch.object(mesh_start, "TCPStore", side_effect=AssertionError("listens")),
    ):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config_json()), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": MeshShape(tp=4)}, r"o_groups \(2\) is not divisible by tp \(4\)"),
        (
            {"mesh": MeshShape(dp=3, ep=3), "num_slots": 3},
            r"n_routed_experts \(8\) is not divisible by ep \(3\)",
        ),
        (
            {"mesh": MeshShape(dp=2), "num_slots": 5},
            r"num_slots \(5\) is not divisible by dp \(2\); give 4",
        ),
        (
            {"mesh": MeshShape(dp=4), "num_slots": 4, "num_pages": 3},
            r"num_pages \(3\) is not divisible by dp \(4\); give 4",
        ),
        (
            {
                "mesh": MeshShape(dp=2, tp=2),
                "rendezvous": Rendezvous(num_nodes=3, address="10.0.0.1:5000"),
            },
            r"the 4 ranks of DP2 x TP2 EP1 cannot be spread evenly over 3 nodes",
        ),
        (
            {
                "mesh": MeshShape(dp=2),
                "rendezvous": Rendezvous(num_nodes=2, node_rank=1, address="10.0.0.1:5000"),
            },
            "only the first node has a service",
        ),
        ({"mesh": MeshShape(tp=2), "draft_length": 0}, "draft_length is 0"),
    ],
    ids=["groups", "experts", "slots", "pages", "nodes", "another node", "draft length"],
)
def test_what_does_not_fit_the_mesh_is_named_with_its_numbers(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        start_mesh(EngineSettings(checkpoint_dir=folder, **changes))


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    settings = EngineSettings(checkpoint_dir=tmp_path / "nothing", mesh=MeshShape(tp=2))
    with pytest.raises(CheckpointError, match="no checkpoint folder at"):
        start_mesh(settings)
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        start_mesh(EngineSettings(checkpoint_dir=tmp_path, mesh=MeshShape(tp=2)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node_rank": 1}, "node_rank is 1; give 0 to 0 for 1 nodes"),
        ({"num_nodes": 2}, "2 nodes need a rendezvous address"),
        ({"address": "somewhere"}, "rendezvous address 'somewhere' is not host:port"),
        ({"timeout_s": 3.0}, r"timeout_s is 3.0; give at least 30.0"),
        ({"start_timeout_s": 0.0}, r"start_timeout_s is 0.0"),
    ],
)
def test_an_impossible_rendezvous_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rendezvous(**changes)


@dataclass(frozen=True, slots=True)
class OneNpu:
    """What a mesh asks a kind of device before it has one."""

    collectives: str = "hccl"
    num_devices: int = 1


@pytest.fixture
def npu(folder: Path) -> Iterator[EngineSettings]:
    """Settings for two ranks on a machine with one device."""
    with mock.patch.object(mesh_start, "open_backend", lambda name: OneNpu()):
        yield EngineSettings(
            checkpoint_dir=folder,
            device="npu",
            mesh=MeshShape(tp=2),
            rendezvous=Rendezvous(num_nodes=2, address="10.0.0.1:5000", timeout_s=45.0),
        )


def test_every_rank_of_a_node_needs_a_device_of_its_own(npu: EngineSettings) -> None:
    """Guards a former gap: no test noticed when devices were not counted."""
    with pytest.raises(
        ConfigError, match="DP1 x TP2 EP1 needs 2 devices on each of 1 nodes; this one has 1"
    ):
        start_mesh(replace(npu, rendezvous=Rendezvous()))
    with pytest.raises(AssertionError, match="listens"):
        start_mesh(npu)


def test_a_device_has_its_own_collectives_and_every_one_its_deadline(npu: EngineSettings) -> None:
    """Guards a former gap: no test noticed gloo in place of a device's own, nor groups without a deadline. What is sent
    besides the model's tensors is host memory, which gloo moves."""
    groups = mock.Mock()
    with (
        mock.patch.object(dist, "init_process_group", groups.all_ranks),
        mock.patch.object(mesh_start, "open_communicator", groups.axes),
        mock.patch.object(mesh_start, "open_groups", groups.exchange),
        mock.patch.object(mesh_start, "build_rank", side_effect=InterruptedError),
        pytest.raises(InterruptedError),
    ):
        mesh_start._join(npu, mock.Mock(), mock.Mock(), rank=1)
    timeout = timedelta(seconds=45)
    assert groups.mock_calls == [
        mock.call.all_ranks("gloo", store=mock.ANY, rank=1, world_size=2, timeout=timeout),
        mock.call.axes(Shard(mesh=npu.mesh, rank=1), backend="hccl", timeout=timeout),
        mock.call.exchange(npu.mesh, timeout=timeout),
    ]


def test_settings_reach_the_ranks_as_they_are() -> None:
    settings = EngineSettings(
        checkpoint_dir=Path("/models/flash"),
        mesh=MeshShape(dp=4, tp=4, ep=16),
        rendezvous=Rendezvous(num_nodes=2, address="10.0.0.1:5000", timeout_s=45.0),
        dtype="bfloat16",
        checks_replicas=True,
        num_pages=64,
        memory_fraction=0.8,
        max_step_rows=99,
    )
    assert EngineSettings.from_json(settings.to_json()) == settings
