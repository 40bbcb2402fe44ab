"""The least that the ranks of a mesh can give away, against going through every choice of experts."""

from __future__ import annotations

import itertools
from statistics import mean

import pytest

from benchmarks.collectives import ITEM_BYTES, Counted, RowLayers, minimum_bytes
from common.model.config import ModelConfig
from common.parallel.mesh import MeshShape
from common.parallel.shard import Shard
from tests.support.tiny_checkpoint import config_json

CONFIG = ModelConfig.from_json(config_json(n_routed_experts=16))
ROW_BYTES = CONFIG.hidden_size * ITEM_BYTES


def ranks_outside(mesh: MeshShape) -> float:
    """Ranks of other groups than the first that have one of a row's experts, on average over all choices."""
    holders = {
        expert: rank
        for rank in range(mesh.num_ranks)
        for expert in Shard(mesh=mesh, rank=rank).experts(16)
    }
    choices = itertools.combinations(range(16), CONFIG.num_experts_per_tok)
    return mean(
        len({holders[expert] for expert in choice if holders[expert] >= mesh.tp})
        for choice in choices
    )


@pytest.mark.parametrize(
    "mesh", [MeshShape(dp=4, tp=4, ep=16), MeshShape(dp=4, tp=2, ep=8)], ids=str
)
def test_the_minimum_is_that_of_sums_and_of_chosen_experts(mesh: MeshShape) -> None:
    sums = 2 * 2 * (mesh.tp - 1) / mesh.tp * ROW_BYTES
    chosen = ranks_outside(mesh)
    alone = minimum_bytes(CONFIG, mesh, RowLayers(first=6))
    assert alone == pytest.approx(6 * (sums + chosen / mesh.tp * ROW_BYTES))
    # When all groups bring as much, a rank gives as many summands as it gets.
    alike = minimum_bytes(CONFIG, mesh, RowLayers(first=6, others=6 * (mesh.dp - 1)))
    assert alike == pytest.approx(6 * (sums + 2 * chosen / mesh.tp * ROW_BYTES))


def test_a_group_without_rows_only_answers() -> None:
    mesh = MeshShape(dp=4, tp=4, ep=16)
    answered = minimum_bytes(CONFIG, mesh, RowLayers(others=8))
    assert answered == pytest.approx(8 * ranks_outside(mesh) / 12 * ROW_BYTES)


def test_what_a_token_costs_is_shared_by_the_layers_of_target_and_drafter() -> None:
    """Seven rows that pass all layers make three tokens; what sampling gathers is of no layer."""
    mesh = MeshShape(dp=4, tp=4, ep=16)
    layers = CONFIG.num_hidden_layers + CONFIG.num_drafter_layers
    rows = RowLayers(first=7 * layers)
    counted = Counted(
        config=CONFIG,
        mesh=mesh,
        sent={"tp.sum": 900, "dp.gather_rows": 200},
        vocabulary=55,
        rows=rows,
    )
    by_row, by_token = counted.by_row(), counted.by_token(3)
    assert layers == 4 + 3
    assert by_token["bytes_per_token_layer"] == pytest.approx(1100 / 3 / 7)
    for name in ("bytes", "minimum_bytes"):
        assert by_token[f"{name}_per_token_layer"] == pytest.approx(
            by_row[f"{name}_per_row_layer"] * 7 / 3
        )
    assert by_row["minimum_bytes_per_row_layer"] == pytest.approx(
        minimum_bytes(CONFIG, mesh, RowLayers(first=1))
    )
