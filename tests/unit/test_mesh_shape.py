"""Which meshes a model and its nodes admit, and that the parts of all ranks cover everything once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.checkpoint.folder import DEFAULT_MODEL, checkpoint_folder
from common.errors import ConfigError
from common.model.config import ModelConfig
from common.model.divisible import divisible
from common.parallel.mesh import Divisible, MeshShape, require_devices
from common.parallel.shard import WHOLE, Shard
from tools.official_configs import FLASH_DSPARK, PRO_DSPARK

NUMBERS = Divisible(
    num_attention_heads=64, o_groups=8, n_routed_experts=256, moe_intermediate_size=2048
)
FLASH = divisible(ModelConfig.from_json(FLASH_DSPARK))
TINY = divisible(ModelConfig.load(checkpoint_folder(DEFAULT_MODEL)))


# Shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ep", [1, 16])
def test_experts_are_spread_over_one_rank_or_over_all(ep: int) -> None:
    assert MeshShape(dp=4, tp=4, ep=ep).num_ranks == 16


@pytest.mark.parametrize("ep", [2, 4, 8, 15, 32])
def test_any_other_spread_is_refused_with_the_numbers(ep: int) -> None:
    message = rf"ep is {ep}; give 1 or all 16 ranks of dp 4 x tp 4"
    with pytest.raises(ConfigError, match=message):
        MeshShape(dp=4, tp=4, ep=ep)


@pytest.mark.parametrize("numbers", [{"dp": 0}, {"tp": -1}, {"ep": 0}])
def test_numbers_below_one_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"dp -?\d, tp -?\d and ep -?\d must be at least 1"):
        MeshShape(**numbers)


# Models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [FLASH, TINY], ids=["flash", "tiny"])
@pytest.mark.parametrize(
    "mesh",
    [
        MeshShape(dp=2, tp=4, ep=8),
        MeshShape(dp=4, tp=4, ep=16),
        MeshShape(dp=4, tp=4),
        MeshShape(tp=4, ep=4),
        MeshShape(dp=8, ep=8),
        MeshShape(),
    ],
    ids=str,
)
def test_both_models_run_on_the_reference_topologies_and_on_others(
    model: Divisible, mesh: MeshShape
) -> None:
    model.require_divided_by(mesh)


def test_the_numbers_are_those_of_the_published_models() -> None:
    assert FLASH == NUMBERS
    pro = divisible(ModelConfig.from_json(PRO_DSPARK))
    for tp in (1, 2, 4, 8, 16):
        pro.require_divided_by(MeshShape(dp=2, tp=tp))


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        (MeshShape(tp=3), {}, r"num_attention_heads \(64\) is not divisible by tp \(3\)"),
        (MeshShape(tp=16), {}, r"o_groups \(8\) is not divisible by tp \(16\)"),
        (MeshShape(dp=3, ep=3), {}, r"n_routed_experts \(256\) is not divisible by ep \(3\)"),
        (
            MeshShape(tp=8),
            {"moe_intermediate_size": 2052},
            r"moe_intermediate_size \(2052\) is not divisible by tp \(8\)",
        ),
    ],
    ids=["heads", "groups", "experts", "expert width"],
)
def test_what_does_not_divide_is_named_with_both_numbers(
    mesh: MeshShape, changes: dict[str, int], message: str
) -> None:
    numbers = {name: getattr(NUMBERS, name) for name in NUMBERS.__dataclass_fields__}
    with pytest.raises(ConfigError, match=message):
        Divisible(**numbers | changes).require_divided_by(mesh)


@given(
    dp=st.integers(1, 6),
    tp=st.integers(1, 6),
    spreads=st.booleans(),
    groups=st.integers(1, 12),
    heads_each=st.integers(1, 4),
    experts=st.integers(1, 24),
    width=st.integers(1, 24),
)
def test_everything_that_divides_is_admitted_and_nothing_else(
    dp: int, tp: int, spreads: bool, groups: int, heads_each: int, experts: int, width: int
) -> None:
    mesh = MeshShape(dp=dp, tp=tp, ep=dp * tp if spreads else 1)
    model = Divisible(
        num_attention_heads=groups * heads_each,
        o_groups=groups,
        n_routed_experts=experts,
        moe_intermediate_size=width,
    )
    # Groups divide heads already; the shared expert's width is always spread over a group.
    divides = not groups % tp and not experts % mesh.ep and not width % tp
    try:
        model.require_divided_by(mesh)
    except ConfigError:
        assert not divides
    else:
        assert divides


# Nodes -----------------------------------------------------------------------------------------------------------


def test_ranks_are_spread_evenly_over_nodes() -> None:
    mesh = MeshShape(dp=4, tp=4, ep=16)
    assert require_devices(mesh, num_nodes=1, num_devices=None) == 16
    assert require_devices(mesh, num_nodes=1, num_devices=16) == 16
    assert require_devices(mesh, num_nodes=2, num_devices=8) == 8


@pytest.mark.parametrize(
    ("num_nodes", "num_devices", "message"),
    [
        (3, None, r"the 16 ranks of DP4 x TP4 EP16 cannot be spread evenly over 3 nodes"),
        (0, None, r"over 0 nodes"),
        (1, 8, r"DP4 x TP4 EP16 needs 16 devices on each of 1 nodes; this one has 8"),
        (2, 7, r"needs 8 devices on each of 2 nodes; this one has 7"),
    ],
)
def test_nodes_without_enough_devices_are_refused_with_the_numbers(
    num_nodes: int, num_devices: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        require_devices(MeshShape(dp=4, tp=4, ep=16), num_nodes=num_nodes, num_devices=num_devices)


# Parts -----------------------------------------------------------------------------------------------------------

MESHES = st.builds(
    lambda dp, tp, spreads: MeshShape(dp=dp, tp=tp, ep=dp * tp if spreads else 1),
    st.integers(1, 5),
    st.integers(1, 6),
    st.booleans(),
)


def shards(mesh: MeshShape) -> list[Shard]:
    return [Shard(mesh=mesh, rank=rank) for rank in range(mesh.num_ranks)]


def covered(parts: list[range]) -> Counter[int]:
    return Counter(i for part in parts for i in part)


def as_range(part: slice) -> range:
    return range(part.start, part.stop)


@given(mesh=MESHES)
def test_every_place_of_the_mesh_has_one_rank_and_every_group_one_leader(mesh: MeshShape) -> None:
    places = Counter((shard.dp_rank, shard.tp_rank) for shard in shards(mesh))
    assert places == Counter((dp, tp) for dp in range(mesh.dp) for tp in range(mesh.tp))
    leaders = [shard for shard in shards(mesh) if shard.is_leader]
    assert [shard.dp_rank for shard in leaders] == list(range(mesh.dp))


@given(mesh=MESHES, part=st.integers(1, 9))
def test_equal_parts_cover_everything_once_in_every_group(mesh: MeshShape, part: int) -> None:
    size = part * mesh.tp
    parts = [as_range(shard.tp_part(size)) for shard in shards(mesh)]
    assert covered(parts) == dict.fromkeys(range(size), mesh.dp)
    assert {len(each) for each in parts} == {part}


@given(mesh=MESHES, size=st.integers(1, 40))
def test_the_vocabulary_is_covered_once_in_order_and_only_its_end_is_short(
    mesh: MeshShape, size: int
) -> None:
    """A whole row is the parts side by side, the short ones filled up: that only holds when they are last."""
    parts = [as_range(shard.vocabulary_part(size)) for shard in shards(mesh)[: mesh.tp]]
    assert [i for part in parts for i in part] == list(range(size))
    widest = -(-size // mesh.tp)
    full = size // widest
    assert [len(part) for part in parts[:full]] == [widest] * full
    assert sum(len(part) for part in parts[full:]) == size - full * widest


@given(mesh=MESHES, each=st.integers(1, 4), width_each=st.integers(1, 5))
def test_every_column_of_every_expert_is_held_once(
    mesh: MeshShape, each: int, width_each: int
) -> None:
    """Spread over all ranks, or whole in every group with columns spread over its ranks."""
    num_experts, width = each * mesh.ep, width_each * mesh.tp
    held = Counter(
        (expert, column)
        for shard in shards(mesh)
        for expert in shard.experts(num_experts)
        for column in as_range(shard.expert_width(width))
    )
    copies = mesh.dp if mesh.ep == 1 else 1
    everything = [(e, column) for e in range(num_experts) for column in range(width)]
    assert held == dict.fromkeys(everything, copies)


def test_flash_and_its_vocabulary_are_cut_as_upstream_cuts_them() -> None:
    shard = Shard(mesh=MeshShape(dp=4, tp=4, ep=16), rank=6)
    assert (shard.dp_rank, shard.tp_rank) == (1, 2)
    assert shard.vocabulary_part(129280) == slice(2 * 32320, 3 * 32320)
    assert shard.experts(256) == range(96, 112)
    assert shard.tp_part(8) == slice(4, 6)
    assert str(shard) == "rank 6 of 16 (dp 1, tp 2)"


def test_a_mesh_of_one_has_everything() -> None:
    assert WHOLE.tp_part(7) == WHOLE.vocabulary_part(7) == WHOLE.expert_width(7) == slice(0, 7)
    assert WHOLE.experts(7) == range(7)
