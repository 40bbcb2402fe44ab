"""Experts that are spread over the ranks of a mesh give what one bank of all of them gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from common.model.config import ModelConfig
from common.model.experts import ExpertBank
from common.model.kernels import Kernels
from common.model.kernels.cpu import CpuKernels
from common.model.kernels.plain import PlainKernels
from common.model.moe import MoE, SpreadExperts
from common.model.weights import Weights
from common.parallel.collectives import Communicator
from common.parallel.mesh import MeshShape
from common.parallel.shard import WHOLE
from tests.support.thread_ranks import run_ranks
from tests.support.tiny_checkpoint import config_json, random_tensors

CONFIG = ModelConfig.from_json(config_json(n_routed_experts=16, compress_ratios=[0, 4, 0]))
TENSORS = random_tensors(CONFIG, seed=5)
CPU = torch.device("cpu")
SPREAD = [(1, 2), (2, 1), (2, 2), (4, 1), (4, 4)]
"""Groups and ranks of each; experts are over all."""


def weights(index: int = 1) -> Weights:
    return Weights(TENSORS, dtype=torch.float32, device=CPU).under(f"layers.{index}.ffn")


def rows(count: int, seed: int, top_k: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + count)
    x = torch.randn(count, CONFIG.hidden_size, generator=generator)
    scores = torch.rand(count, CONFIG.n_routed_experts, generator=generator)
    ids = scores.topk(top_k).indices
    return x, ids, torch.rand(ids.shape, generator=generator)


def spread(counts: Sequence[int], tp: int, kernels: Kernels, top_k: int = 2) -> list[torch.Tensor]:
    """What every group gets for its rows when each rank has its experts only."""
    mesh = MeshShape(dp=len(counts), tp=tp, ep=len(counts) * tp)

    def body(comm: Communicator) -> torch.Tensor:
        experts = SpreadExperts(ExpertBank(CONFIG, weights(), kernels, comm.shard), comm)
        group = comm.shard.dp_rank
        return comm.tp.sum(experts(*rows(counts[group], group, top_k), counts))

    by_rank = run_ranks(mesh, body)
    for rank, found in enumerate(by_rank):
        assert torch.equal(found, by_rank[rank // tp * tp]), f"rank {rank} differs from its group"
    return by_rank[::tp]


def whole(counts: Sequence[int], kernels: Kernels, top_k: int = 2) -> list[torch.Tensor]:
    bank = ExpertBank(CONFIG, weights(), kernels, WHOLE)
    return [
        bank(*rows(count, group, top_k)) if count else rows(0, group)[0]
        for group, count in enumerate(counts)
    ]


@pytest.mark.parametrize(("dp", "tp"), SPREAD)
def test_few_rows_with_one_expert_each_give_the_same_bits(dp: int, tp: int) -> None:
    """Nothing is added up then: a row's numbers are those of its expert, or zeros from all other ranks."""
    counts = [1 + group % 2 for group in range(dp)]
    assert sum(counts) <= CpuKernels.few_pairs
    found = spread(counts, tp, CpuKernels(), top_k=1)
    for ours, expected in zip(found, whole(counts, CpuKernels(), top_k=1), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("kernels", [PlainKernels(), CpuKernels()], ids=["plain", "cpu"])
@pytest.mark.parametrize(("dp", "tp"), SPREAD)
def test_few_rows_with_two_experts_each_give_the_same_but_for_one_rounding(
    dp: int, tp: int, kernels: Kernels
) -> None:
    counts = [1 + group % 2 for group in range(dp)]
    for found, expected in zip(spread(counts, tp, kernels), whole(counts, kernels), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("dp", "tp"), SPREAD)
def test_many_rows_give_the_same_but_for_rounding(dp: int, tp: int) -> None:
    counts = [40 + 7 * group for group in range(dp)]
    for found, expected in zip(
        spread(counts, tp, CpuKernels()), whole(counts, CpuKernels()), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("hidden", [32, 33])
def test_bfloat16_rows_travel_as_they_are(hidden: int) -> None:
    """They share their bytes with integers of twice their size, and an odd number of them ends between two of those."""
    config = ModelConfig.from_json(
        config_json(n_routed_experts=16, compress_ratios=[0, 4, 0], hidden_size=hidden)
    )
    tensors = random_tensors(config, seed=5)
    bank_weights = Weights(tensors, dtype=torch.bfloat16, device=CPU).under("layers.1.ffn")
    generator = torch.Generator().manual_seed(1)
    counts = [3, 2]
    x = torch.randn(5, hidden, generator=generator).bfloat16()
    ids = torch.rand(5, 16, generator=generator).topk(1).indices
    ones = torch.ones(5, 1)

    def body(comm: Communicator) -> torch.Tensor:
        bank = ExpertBank(config, bank_weights, PlainKernels(), comm.shard)
        mine = slice(0, 3) if comm.shard.dp_rank == 0 else slice(3, 5)
        return comm.tp.sum(SpreadExperts(bank, comm)(x[mine], ids[mine], ones[mine], counts))

    found = run_ranks(MeshShape(dp=2, tp=2, ep=4), body)
    expected = ExpertBank(config, bank_weights, PlainKernels(), WHOLE)(x, ids, ones)
    torch.testing.assert_close(torch.cat((found[0], found[2])), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("counts", [[0, 3], [3, 0], [0, 0, 0, 2], [5, 0, 1, 0]], ids=str)
def test_groups_without_rows_take_part_for_the_others(counts: list[int]) -> None:
    found = spread(counts, 2, CpuKernels())
    assert [len(each) for each in found] == counts
    for ours, expected in zip(found, whole(counts, CpuKernels()), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_rows_that_all_choose_one_experts_rank_leave_the_others_idle() -> None:
    mesh = MeshShape(dp=2, tp=2, ep=4)
    x = torch.randn(3, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    ids, ones = torch.tensor([[12, 15], [13, 12], [14, 13]]), torch.ones(3, 2)

    def body(comm: Communicator) -> torch.Tensor:
        experts = SpreadExperts(ExpertBank(CONFIG, weights(), CpuKernels(), comm.shard), comm)
        return experts(x, ids, ones, [3, 3])

    parts = run_ranks(mesh, body)
    bank = ExpertBank(CONFIG, weights(), CpuKernels(), WHOLE)
    # The last rank has experts 12 to 15. It is in the place of ranks 1 and 3, whose groups it answers.
    for rank, part in enumerate(parts):
        expected = bank(x, ids, ones) if rank % 2 else torch.zeros_like(x)
        torch.testing.assert_close(part, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("index", [0, 1], ids=["hash", "score"])
@pytest.mark.parametrize(("dp", "tp", "ep"), [(1, 2, 1), (2, 2, 1), (2, 2, 4), (1, 4, 4)])
def test_a_whole_sublayer_equals_the_unspread_one(dp: int, tp: int, ep: int, index: int) -> None:
    """Shared expert included: its width is spread over a group, and its part is summed once."""
    counts = [5 + 2 * group for group in range(dp)]

    def inputs(group: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(group)
        x = torch.randn(counts[group], CONFIG.hidden_size, generator=generator)
        return x, torch.randint(0, CONFIG.vocab_size, (counts[group],), generator=generator)

    def body(comm: Communicator) -> torch.Tensor:
        moe = MoE(
            CONFIG,
            weights(index),
            CpuKernels(),
            comm,
            is_hash_routed=index < CONFIG.num_hash_layers,
        )
        return moe(*inputs(comm.shard.dp_rank), counts)

    alone = MoE(
        CONFIG,
        weights(index),
        CpuKernels(),
        Communicator(),
        is_hash_routed=index < CONFIG.num_hash_layers,
    )
    expected = [alone(*inputs(group), (counts[group],)) for group in range(dp)]
    for rank, found in enumerate(run_ranks(MeshShape(dp=dp, tp=tp, ep=ep), body)):
        torch.testing.assert_close(found, expected[rank // tp], atol=1e-5, rtol=1e-5)


def test_rows_are_given_to_other_groups_once_and_only_sums_come_back() -> None:
    """What a rank gives away: its rows with ids and weights, and a summand for every row of others."""
    counts, mesh = [2, 3, 0, 1], MeshShape(dp=4, tp=2, ep=8)
    hidden, top_k = CONFIG.hidden_size, CONFIG.num_experts_per_tok

    def body(comm: Communicator) -> dict[str, int]:
        experts = SpreadExperts(ExpertBank(CONFIG, weights(), CpuKernels(), comm.shard), comm)
        group = comm.shard.dp_rank
        experts(*rows(counts[group], group), counts)
        return comm.sent_bytes()

    for rank, sent in enumerate(run_ranks(mesh, body)):
        mine = counts[rank // 2]
        assert sent == {
            "dp.gather_rows": 3 * mine * (4 * hidden + 8 * top_k),
            "dp.sum_parts": (sum(counts) - mine) * 4 * hidden,
        }
