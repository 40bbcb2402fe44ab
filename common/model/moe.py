"""Mixture of experts: hash- or score-routed experts and a shared one, SwiGLU with clamps.

Letters: N rows, E experts, k experts per token, I expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.model.config import ModelConfig
from common.model.kernels import Kernels
from common.model.weights import Weights


class ExpertBank:
    """The routed experts of one layer, stacked; tensors `experts.{e}.w1|w2|w3`."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        experts, width, hidden = (
            config.n_routed_experts,
            config.moe_intermediate_size,
            config.hidden_size,
        )
        self._num_experts = experts
        self._limit = config.swiglu_limit
        self._kernels = kernels
        # Filled one by one: a layer's experts in a list and stacked would be in memory twice.
        self.w13 = weights.empty_matrices(experts, 2 * width, hidden)  # [E, 2 * I, D]
        self.w2 = weights.empty_matrices(experts, width, hidden)  # [E, I, D]
        for e in range(experts):
            expert = weights.under(f"experts.{e}")
            expert.fill(self.w13[e, :width], "w1.weight", width, hidden)
            expert.fill(self.w13[e, width:], "w3.weight", width, hidden)
            expert.fill(self.w2[e], "w2.weight", hidden, width, is_transposed=True)

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of the chosen experts; `expert_ids`, `expert_weights` are `[N, k]`."""
        if expert_ids.numel() <= self._kernels.few_pairs:
            return self._kernels.few_experts(
                x, expert_ids, expert_weights, self.w13, self.w2, self._limit
            )
        return self.grouped(x, expert_ids, expert_weights)

    def grouped(
        self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor
    ) -> torch.Tensor:
        """Each chosen expert once, over the rows that chose it."""
        top_k = expert_ids.shape[1]
        order = expert_ids.flatten().argsort(stable=True)
        rows = order // top_k
        counts = torch.bincount(expert_ids.flatten(), minlength=self._num_experts).tolist()
        weights = expert_weights.flatten()[order].to(x.dtype).unsqueeze(-1)
        sorted_x = x[rows]
        outputs = []
        begin = 0
        for e, count in enumerate(counts):
            if count:
                end = begin + count
                y = swiglu(F.linear(sorted_x[begin:end], self.w13[e]), self._limit)
                outputs.append((y * weights[begin:end]) @ self.w2[e])
                begin = end
        return torch.zeros_like(x).index_add_(0, rows, torch.cat(outputs))


class HashRouter:
    """Chooses by token id alone; tensor `gate.tid2eid`."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.tid2eid = weights.integers(
            "gate.tid2eid", config.vocab_size, config.num_experts_per_tok
        )

    def choose(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """`[N, k]` experts of rows with input `token_ids [N]`."""
        return self.tid2eid[token_ids]


class ScoreRouter:
    """Chooses by score plus a load-balancing bias, which does not weigh the chosen; tensor `gate.bias`."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._top_k = config.num_experts_per_tok
        self.bias = weights.floats("gate.bias", config.n_routed_experts)

    def choose(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """`[N, k]` experts of rows with `scores [N, E]`."""
        return (scores + self.bias).topk(self._top_k, dim=-1, sorted=False).indices


class MoE:
    """The feed-forward sublayer; tensors under `ffn.`. Drafter stages always route by score."""

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: Kernels, *, is_hash_routed: bool
    ) -> None:
        hidden = config.hidden_size
        width = config.moe_intermediate_size * config.n_shared_experts
        self._limit = config.swiglu_limit
        self._scaling = config.routed_scaling_factor
        self._normalise = config.norm_topk_prob
        self.gate = weights.floats("gate.weight", config.n_routed_experts, hidden)
        self._router = (HashRouter if is_hash_routed else ScoreRouter)(config, weights)
        shared = weights.under("shared_experts")
        self.shared_w13 = torch.cat(
            (
                shared.matrix("w1.weight", width, hidden),
                shared.matrix("w3.weight", width, hidden),
            )
        )
        self.shared_w2 = shared.matrix("w2.weight", hidden, width)
        self.experts = ExpertBank(config, weights, kernels)

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """`x [N, D]` to `[N, D]`; `token_ids [N]` are the rows' input tokens."""
        scores = F.softplus(F.linear(x.float(), self.gate)).sqrt_()
        expert_ids = self._router.choose(scores, token_ids)
        chosen = scores.gather(1, expert_ids)
        if self._normalise:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        shared = F.linear(swiglu(F.linear(x, self.shared_w13), self._limit), self.shared_w2)
        return shared + self.experts(x, expert_ids, chosen * self._scaling)


def swiglu(pair: torch.Tensor, limit: float) -> torch.Tensor:
    """`[..., 2 * I]` of gate and up to `[..., I]`; the gate is clamped above, the up part on both sides."""
    gate, up = pair.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
