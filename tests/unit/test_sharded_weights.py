"""Every rank asks for its own parts of the weights only, and all ranks together for everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
import torch

from common.model.config import ModelConfig
from common.model.dspark import build_model
from common.model.memory import held_tensors
from common.model.weights import PieceSource, TensorPart
from common.parallel.mesh import MeshShape
from tests.support.thread_ranks import thread_communicators
from tests.support.tiny_checkpoint import config_json, random_tensors

CONFIG = ModelConfig.from_json(
    config_json(
        vocab_size=253, dspark_noise_token_id=252, n_routed_experts=16, o_groups=4, hidden_size=32
    )
)
TENSORS = random_tensors(CONFIG, seed=3)
CPU = torch.device("cpu")
MESHES = [MeshShape(dp=4, tp=4, ep=16), MeshShape(dp=2, tp=4, ep=8), MeshShape(dp=2, tp=2)]

BY_ROWS = (
    "head.weight",
    "attn.attn_sink",
    "attn.wq_b.weight",
    "attn.wo_a.weight",
    "shared_experts.w1.weight",
    "shared_experts.w3.weight",
    "markov_w2.weight",
)
BY_COLUMNS = ("attn.wo_b.weight", "shared_experts.w2.weight")
"""What the ranks of a group have in parts; everything else but routed experts is whole on every rank."""


class RecordingSource(Mapping[str, torch.Tensor]):
    """Gives a few rows at a time, and remembers what was asked for."""

    def __init__(self) -> None:
        self.asked: list[TensorPart] = []

    def read_into(self, part: TensorPart, room: torch.Tensor) -> bool:
        return False

    def pieces(self, part: TensorPart) -> Iterator[torch.Tensor]:
        self.asked.append(part)
        tensor = TENSORS[part.name]
        rows = tensor if part.rows is None else tensor[part.rows]
        rows = rows if part.columns is None else rows[:, part.columns]
        yield from torch.split(rows, 7)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(TENSORS[name].shape)

    def __getitem__(self, name: str) -> torch.Tensor:
        raise AssertionError(f"all of {name} was asked for")

    def __contains__(self, name: object) -> bool:
        return name in TENSORS

    def __iter__(self) -> Iterator[str]:
        return iter(TENSORS)

    def __len__(self) -> int:
        return len(TENSORS)


def asked_by_ranks(mesh: MeshShape) -> list[list[TensorPart]]:
    asked = []
    for comm in thread_communicators(mesh):
        source = RecordingSource()
        assert isinstance(source, PieceSource)
        build_model(CONFIG, source, dtype=torch.float32, device=CPU, comm=comm)
        asked.append(source.asked)
    return asked


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_together_the_ranks_ask_for_every_number_as_often_as_it_is_held(mesh: MeshShape) -> None:
    asked = asked_by_ranks(mesh)
    held = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in TENSORS.items()}
    for parts in asked:
        assert max(Counter(part.name for part in parts).values()) == 1, "a tensor was read twice"
        for part in parts:
            chosen = (part.rows or slice(None), part.columns or slice(None))
            held[part.name][chosen[: held[part.name].dim()]] += 1
    for name, counts in held.items():
        is_expert = ".ffn.experts." in name
        if is_expert and mesh.ep > 1:
            copies = 1
        elif is_expert or (name.endswith((*BY_ROWS, *BY_COLUMNS)) and ".indexer." not in name):
            copies = mesh.dp
        else:
            copies = mesh.num_ranks
        assert set(counts.flatten().tolist()) == {copies}, name


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parts_are_cut_along_the_side_that_the_mesh_spreads(mesh: MeshShape) -> None:
    parts = [part for asked in asked_by_ranks(mesh) for part in asked]
    for part in parts:
        sides = (part.rows is not None, part.columns is not None)
        if ".indexer." in part.name:
            assert sides == (False, False), part
        elif ".ffn.experts." in part.name:
            by_width = (False, True) if part.name.endswith("w2.weight") else (True, False)
            assert sides == (by_width if mesh.ep == 1 else (False, False)), part
        else:
            assert sides == (part.name.endswith(BY_ROWS), part.name.endswith(BY_COLUMNS)), part


def test_a_rank_asks_for_no_expert_but_its_own() -> None:
    mesh = MeshShape(dp=4, tp=4, ep=16)
    for rank, asked in enumerate(asked_by_ranks(mesh)):
        experts = {
            part.name.split(".experts.")[1].split(".")[0]
            for part in asked
            if ".experts." in part.name
        }
        assert experts == {str(rank)}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_nothing_held_is_a_view_of_something_larger(mesh: MeshShape) -> None:
    """All of a tensor would stay in memory behind a view of a rank's part."""
    for comm in thread_communicators(mesh):
        model = build_model(CONFIG, TENSORS, dtype=torch.float32, device=CPU, comm=comm)
        held = held_tensors(model)
        for tensor in held.target + held.drafter:
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, tuple(tensor.shape)
