"""A rank's routed experts of one layer: as values, or as the checkpoint stores them.

Letters: N rows, E experts, k experts per token, I expert width; E and I are what this rank has of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from common.model.config import ModelConfig
from common.model.kernels import Kernels
from common.model.matrices import Matrix
from common.model.weights import Weights
from common.parallel.shard import Shard


class ExpertBank:
    """This rank's routed experts of one layer, stacked; tensors `experts.{e}.w1|w2|w3`."""

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: Kernels, shard: Shard
    ) -> None:
        whole, hidden = config.moe_intermediate_size, config.hidden_size
        part = shard.expert_width(whole)
        width = part.stop - part.start
        ids = shard.experts(config.n_routed_experts)
        self.first = ids.start
        """Id of the first expert."""
        self.num_experts = experts = len(ids)
        self._limit = config.swiglu_limit
        self._kernels = kernels
        # Filled one by one: a layer's experts in a list and stacked would be in memory twice.
        self.w13 = weights.empty_matrices(experts, 2 * width, hidden)  # [E, 2 * I, D]
        self.w2 = weights.empty_matrices(experts, hidden, width)  # [E, D, I]
        for e in range(experts):
            expert = weights.under(f"experts.{ids[e]}")
            expert.fill(self.w13[e, :width], "w1.weight", whole, hidden, rows=part)
            expert.fill(self.w13[e, width:], "w3.weight", whole, hidden, rows=part)
            expert.fill(self.w2[e], "w2.weight", hidden, whole, columns=part)

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of the chosen experts; `expert_ids`, which count from `first`, and `expert_weights` are `[N, k]`."""
        if expert_ids.numel() <= self._kernels.few_pairs:
            return self._kernels.few_experts(
                x, expert_ids, expert_weights, self.w13, self.w2, self._limit
            )
        return self.grouped(x, expert_ids, expert_weights)

    def grouped(
        self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor
    ) -> torch.Tensor:
        """Each chosen expert once, over the rows that chose it."""

        def run(e: int, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            y = swiglu(F.linear(rows, self.w13[e]), self._limit)
            return F.linear(y * weights, self.w2[e])

        return _by_expert(run, self.num_experts, x, expert_ids, expert_weights)


class StoredExpertBank:
    """The same as the checkpoint stores them: values of one expert at a time exist, while it is used."""

    def __init__(self, config: ModelConfig, weights: Weights, shard: Shard) -> None:
        whole, hidden = config.moe_intermediate_size, config.hidden_size
        part = shard.expert_width(whole)
        ids = shard.experts(config.n_routed_experts)
        self.first = ids.start
        """Id of the first expert."""
        self.num_experts = len(ids)
        self._limit = config.swiglu_limit
        self._w1: list[Matrix] = []
        self._w3: list[Matrix] = []
        self._w2: list[Matrix] = []
        for e in ids:
            expert = weights.under(f"experts.{e}")
            self._w1.append(expert.held("w1.weight", whole, hidden, rows=part))
            self._w3.append(expert.held("w3.weight", whole, hidden, rows=part))
            self._w2.append(expert.held("w2.weight", hidden, whole, columns=part))

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of the chosen experts; `expert_ids`, which count from `first`, and `expert_weights` are `[N, k]`."""

        def run(e: int, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            pair = torch.cat((self._w1[e].linear(rows), self._w3[e].linear(rows)), dim=-1)
            return self._w2[e].linear(swiglu(pair, self._limit) * weights)

        return _by_expert(run, self.num_experts, x, expert_ids, expert_weights)


def _by_expert(
    run: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
    num_experts: int,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
) -> torch.Tensor:
    """Run each chosen expert once, over the rows that chose it and their weights, and sum up by row."""
    top_k = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)
    rows = order // top_k
    counts = torch.bincount(expert_ids.flatten(), minlength=num_experts).tolist()
    weights = expert_weights.flatten()[order].to(x.dtype).unsqueeze(-1)
    sorted_x = x[rows]
    outputs = []
    begin = 0
    for e, count in enumerate(counts):
        if count:
            end = begin + count
            outputs.append(run(e, sorted_x[begin:end], weights[begin:end]))
            begin = end
    return torch.zeros_like(x).index_add_(0, rows, torch.cat(outputs))


def swiglu(pair: torch.Tensor, limit: float) -> torch.Tensor:
    """`[..., 2 * I]` of gate and up to `[..., I]`; the gate is clamped above, the up part on both sides."""
    gate, up = pair.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
