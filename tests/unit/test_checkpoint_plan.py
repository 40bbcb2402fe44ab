"""The memory plan reproduces published figures and does with a mesh what the mesh does."""

from __future__ import annotations

from typing import Any

import pytest

from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.plan import CacheFormat, MemoryPlan, PlanRequest, make_plan, row_bytes
from common.checkpoint.weight_bytes import WeightsHeld
from common.errors import ConfigError
from common.kv_cache.layout import Retention
from common.model.cache_layout import cache_layout
from common.model.config import ModelConfig
from common.parallel.mesh import MeshShape
from tools.official_configs import FLASH, FLASH_DSPARK, PRO

KIB, MIB, GIB = 2**10, 2**20, 2**30
CONFIG = ModelConfig.from_json(FLASH_DSPARK)


def plan(config: ModelConfig = CONFIG, **changes: Any) -> MemoryPlan:
    """Without headers tensors are taken to be stored as is usual for the format."""
    request = PlanRequest(**{"device_bytes": 64 * GIB, "cache": CacheFormat.OFFICIAL, **changes})
    return make_plan(config, {}, CheckpointFormat.FP8_FP4, request)


# Published figures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "cache", "token_bytes"),
    [
        (FLASH, CacheFormat.OFFICIAL, 21 * 163 + 20 * 4.5625),
        (FLASH, CacheFormat.OFFICIAL, 3514.25),
        (FLASH, CacheFormat.BF16, 6880),
        (FLASH_DSPARK, CacheFormat.OFFICIAL, 3514.25),
        (PRO, CacheFormat.OFFICIAL, 5031.4375),
    ],
)
def test_bytes_per_token_are_the_published_ones(
    values: dict[str, Any], cache: CacheFormat, token_bytes: float
) -> None:
    found = plan(ModelConfig.from_json(values), cache=cache)
    assert found.token_bytes == token_bytes
    assert found.page_bytes == token_bytes * 128


def test_rows_have_the_published_sizes() -> None:
    layout = cache_layout(CONFIG, dtype="float32")
    sizes = {r.name: row_bytes(r, CONFIG, CacheFormat.OFFICIAL) for r in layout.regions}
    assert sizes["window"] == sizes["csa"] == sizes["hca"] == sizes["drafter"] == 584
    assert sizes["index"] == 68
    # Tails in float32: 64 KiB, 16 KiB and 512 KiB per layer for the rows of a group.
    assert 8 * sizes["csa_tail"] == 64 * KIB and 8 * sizes["index_tail"] == 16 * KIB
    assert 128 * sizes["hca_tail"] == 512 * KIB


def test_a_requests_constant_part_is_the_published_one_plus_what_can_be_rolled_back() -> None:
    rings = [
        r for r in cache_layout(CONFIG, dtype="float32").regions if r.retention is Retention.RING
    ]
    per_row = {r.name: len(r.layer_ids) * row_bytes(r, CONFIG, CacheFormat.OFFICIAL) for r in rings}
    published = 43 * 73 * KIB + 20 * 512 * KIB + 21 * 80 * KIB
    for draft_length in (0, 5, 7):
        found = plan(draft_length=draft_length)
        step = draft_length + 1
        assert found.ring_bytes == published + step * (sum(per_row.values()) - per_row["drafter"])
        assert found.drafter_bytes == 3 * 73 * KIB + step * per_row["drafter"]
    assert plan(cache=CacheFormat.BF16, draft_length=5).drafter_bytes == (384 + 3 * 6) * KIB


def test_weights_on_one_rank_are_the_checkpoint() -> None:
    found = plan(weights=WeightsHeld.STORED)
    assert found.weight_bytes == pytest.approx(166.88e9, rel=1e-4)
    assert found.expert_bytes == 46 * 256 * 3 * 2048 * 4096 * 17 // 32
    assert plan(weights=WeightsHeld.BF16).expert_bytes == 46 * 256 * 3 * 2048 * 4096 * 2


def test_native_weights_are_quantised_matrices_as_stored_and_the_rest_as_values() -> None:
    """Of FP8 matrices a byte a value and one for a block of 128 x 128; experts are half of that and one for 32."""
    layers, hidden, width = 46, 4096, 2048
    attention = 1024 * hidden + 32768 * 1024 + 512 * hidden + 2 * 8192 * hidden
    shared = 3 * width * hidden
    fp8 = layers * (attention + shared) + 21 * 64 * 128 * 1024 + hidden * 3 * hidden
    experts = layers * 256 * 3 * width * hidden
    dense, native = plan(weights=WeightsHeld.BF16), plan(weights=WeightsHeld.NATIVE)
    saved = fp8 * 2 - fp8 * 16385 // 16384 + experts * 2 - experts * 17 // 32
    # Latent projections of the stages as values are there twice, once side by side.
    twice = 3 * 512 * hidden * 2
    assert dense.weight_bytes - native.weight_bytes == saved + twice
    stored = plan(weights=WeightsHeld.STORED)
    # Only what the model computes with in float32, or with longer integers, is wider than in the files.
    assert 0 < native.weight_bytes - stored.weight_bytes < 3e9


# The mesh --------------------------------------------------------------------------------------------------------


def test_the_reference_mesh_shares_experts_over_16_and_heads_outputs_and_vocabulary_over_4() -> (
    None
):
    held = WeightsHeld.BF16
    one, sixteen = plan(weights=held), plan(weights=held, mesh=MeshShape(dp=4, tp=4, ep=16))
    heads = 46 * (32768 * 1024 * 2 + 64 * 4)
    output = 46 * (8192 * 4096 + 4096 * 8192) * 2
    shared_experts = 46 * 3 * 2048 * 4096 * 2
    vocabulary = 129280 * (4096 + 256) * 4
    tensor_parallel = heads + output + shared_experts + vocabulary
    saved = one.expert_bytes * 15 // 16 + tensor_parallel * 3 // 4
    assert one.weight_bytes - sixteen.weight_bytes == saved
    assert sixteen.expert_bytes * 16 == one.expert_bytes


def test_without_expert_ranks_a_group_shares_the_width_of_every_expert() -> None:
    assert plan(mesh=MeshShape(dp=4, tp=4)).expert_bytes * 4 == plan().expert_bytes


def test_cache_is_held_by_every_rank_of_a_tensor_parallel_group() -> None:
    assert plan(mesh=MeshShape(tp=4)).page_bytes == plan().page_bytes
    assert plan(mesh=MeshShape(tp=4)).ring_bytes == plan().ring_bytes


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (MeshShape(tp=3), r"num_attention_heads \(64\) is not divisible by tp \(3\)"),
        (MeshShape(tp=16), r"o_groups \(8\) is not divisible by tp \(16\)"),
        (MeshShape(dp=3, ep=3), r"n_routed_experts \(256\) is not divisible by ep \(3\)"),
    ],
)
def test_numbers_that_do_not_go_together_are_named(mesh: MeshShape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(mesh=mesh)


def test_a_mesh_that_cuts_a_group_of_fp4_is_refused_with_the_way_out() -> None:
    """Experts of 96 columns, as the shipped model's, cut in two."""
    config = ModelConfig.from_json({**FLASH_DSPARK, "moe_intermediate_size": 96})
    with pytest.raises(ConfigError) as caught:
        plan(config, mesh=MeshShape(dp=2, tp=2))
    assert caught.value.message == (
        "tp (2) cuts the 96 columns of layers.0.ffn.experts.0.w2.weight into parts of 48, but of an FP4 matrix 32 columns "
        "share a scale and stay together; use ep = dp x tp (4), which leaves experts whole"
    )
    assert plan(config, mesh=MeshShape(dp=2, tp=2, ep=4)).weight_bytes > 0
    # A cut between groups is one.
    wider = ModelConfig.from_json({**FLASH_DSPARK, "moe_intermediate_size": 192})
    assert plan(wider, mesh=MeshShape(tp=2)).weight_bytes > 0


@pytest.mark.parametrize("mesh", [MeshShape(dp=4, tp=4, ep=16), MeshShape(dp=2, tp=4, ep=8)])
def test_both_reference_meshes_are_admitted(mesh: MeshShape) -> None:
    assert plan(mesh=mesh).weight_bytes > 0


# What fits -------------------------------------------------------------------------------------------------------


def test_the_longest_context_fits_and_a_page_more_does_not() -> None:
    found = plan(device_bytes=180 * GIB, weights=WeightsHeld.STORED, cache=CacheFormat.FP32)
    assert 0 < found.longest_context < CONFIG.max_position_embeddings
    used = found.request_bytes + found.longest_context // 128 * found.page_bytes
    assert used <= found.free_bytes < used + found.page_bytes


def test_the_largest_batch_fits_and_one_more_per_group_does_not() -> None:
    mesh = MeshShape(dp=4, tp=4, ep=16)
    found = plan(mesh=mesh, context_length=32768)
    one = found.request_bytes + 256 * found.page_bytes
    per_group = found.largest_batch // 4
    assert per_group * one <= found.free_bytes < (per_group + 1) * one


def test_the_largest_batch_is_shown_by_kind_and_as_the_first_nodes_copy_of_it() -> None:
    found = plan(mesh=MeshShape(dp=4, tp=4, ep=16), context_length=32768)
    per_group = found.largest_batch // 4
    assert per_group > 1
    assert found.batch_page_bytes == per_group * 256 * found.page_bytes
    assert found.batch_ring_bytes == per_group * found.ring_bytes
    assert found.batch_drafter_bytes == per_group * found.drafter_bytes
    held = found.batch_page_bytes + found.batch_ring_bytes + found.batch_drafter_bytes
    assert held <= found.free_bytes and found.host_bytes == 4 * held
    assert plan(weights=WeightsHeld.STORED, device_bytes=180 * GIB).host_bytes == 0


def test_nothing_fits_where_the_weights_do_not() -> None:
    found = plan(device_bytes=16 * GIB)
    assert found.free_bytes < 0
    assert (found.longest_context, found.largest_batch) == (0, 0)


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_length is 1048577"):
        plan(context_length=1048577)
