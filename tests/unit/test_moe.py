"""Expert routing and the two ways of computing experts, against a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from common.model.config import ModelConfig
from common.model.experts import ExpertBank, swiglu
from common.model.kernels import Kernels
from common.model.kernels.cpu import CpuKernels
from common.model.kernels.plain import PlainKernels
from common.model.moe import MoE
from common.model.weights import Weights
from common.parallel.collectives import Communicator
from tests.support.tiny_checkpoint import config_json, random_tensors

CONFIG = ModelConfig.from_json(config_json(swiglu_limit=1.0))
"""A limit this low clamps a good part of all values."""
TENSORS = random_tensors(CONFIG, seed=5)
CPU = torch.device("cpu")


def layer(index: int, kernels: Kernels) -> MoE:
    weights = Weights(TENSORS, dtype=torch.float32, device=CPU).under(f"layers.{index}.ffn")
    return MoE(
        CONFIG, weights, kernels, Communicator(), is_hash_routed=index < CONFIG.num_hash_layers
    )


def inputs(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, CONFIG.hidden_size, generator=generator)
    return x, torch.randint(0, CONFIG.vocab_size, (num_rows,), generator=generator)


def slow_expert(x: torch.Tensor, prefix: str) -> torch.Tensor:
    gate = (TENSORS[f"{prefix}.w1.weight"] @ x).clamp(max=CONFIG.swiglu_limit)
    up = (TENSORS[f"{prefix}.w3.weight"] @ x).clamp(-CONFIG.swiglu_limit, CONFIG.swiglu_limit)
    return TENSORS[f"{prefix}.w2.weight"] @ (gate * torch.sigmoid(gate) * up)


def slow_moe(x: torch.Tensor, token_id: int, index: int) -> torch.Tensor:
    """One token, written from the formulas: unbiased scores weigh, biased ones choose."""
    prefix = f"layers.{index}.ffn"
    scores = torch.log1p(torch.exp(TENSORS[f"{prefix}.gate.weight"] @ x)).sqrt()
    if index < CONFIG.num_hash_layers:
        chosen = TENSORS[f"{prefix}.gate.tid2eid"][token_id].tolist()
    else:
        biased = scores + TENSORS[f"{prefix}.gate.bias"]
        chosen = sorted(range(len(biased)), key=lambda e: -biased[e])[: CONFIG.num_experts_per_tok]
    total = sum(scores[e] for e in chosen)
    out = slow_expert(x, f"{prefix}.shared_experts")
    for e in chosen:
        weight = scores[e] / total * CONFIG.routed_scaling_factor
        out = out + weight * slow_expert(x, f"{prefix}.experts.{e}")
    return out


@pytest.mark.parametrize("kernels", [PlainKernels(), CpuKernels()], ids=["plain", "cpu"])
@pytest.mark.parametrize("index", [0, 1], ids=["hash", "score"])
@pytest.mark.parametrize("num_rows", [1, 9, 300])
def test_every_row_equals_the_token_by_token_formula(
    index: int, num_rows: int, kernels: Kernels
) -> None:
    x, ids = inputs(num_rows)
    expected = torch.stack([slow_moe(x[n], int(ids[n]), index) for n in range(num_rows)])
    torch.testing.assert_close(
        layer(index, kernels)(x, ids, (num_rows,)), expected, atol=2e-5, rtol=1e-5
    )


def test_both_ways_of_computing_experts_are_met_above() -> None:
    pairs = [CONFIG.num_experts_per_tok * rows for rows in (1, 9, 300)]
    assert pairs[0] <= CpuKernels.few_pairs < pairs[-1]


def chosen(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    scores = torch.rand(num_rows, CONFIG.n_routed_experts, generator=generator)
    ids = scores.topk(CONFIG.num_experts_per_tok).indices
    return ids, torch.rand(ids.shape, generator=generator)


@pytest.mark.parametrize("kernels", [PlainKernels(), CpuKernels()], ids=["plain", "cpu"])
@pytest.mark.parametrize("num_rows", [1, 4, 5, 24, 130])
def test_experts_pair_by_pair_and_grouped_agree(num_rows: int, kernels: Kernels) -> None:
    bank = layer(1, kernels).experts
    assert isinstance(bank, ExpertBank)
    x, _ = inputs(num_rows)
    ids, weights = chosen(num_rows)
    few = kernels.few_experts(x, ids, weights, bank.w13, bank.w2, CONFIG.swiglu_limit)
    torch.testing.assert_close(few, bank.grouped(x, ids, weights), atol=2e-5, rtol=1e-5)


def test_the_gate_is_clamped_above_only_and_the_up_part_on_both_sides() -> None:
    pair = torch.tensor([[-30.0, 30.0, -30.0, 30.0]])
    gate_low, gate_high = torch.nn.functional.silu(torch.tensor([-30.0, 10.0]))
    expected = torch.stack((gate_low * -10.0, gate_high * 10.0)).unsqueeze(0)
    torch.testing.assert_close(swiglu(pair, 10.0), expected)
