"""Mixture of experts: hash- or score-routed experts and a shared one, SwiGLU with clamps.

Letters: N rows, E experts, k experts per token, I expert width; E and I are what this rank has of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from common.model.config import ModelConfig
from common.model.experts import ExpertBank, StoredExpertBank, swiglu
from common.model.joined import joined_matrix
from common.model.kernels import Kernels
from common.model.weights import Weights
from common.parallel.collectives import Communicator


class SpreadExperts:
    """Routed experts that are spread over all ranks of a mesh.

    Rows travel between data parallel groups only: the ranks of one group have the same rows already. What comes back is
    a part of the sum, which the group's own sum completes.
    """

    def __init__(self, bank: ExpertBank | StoredExpertBank, comm: Communicator) -> None:
        self._bank = bank
        self._dp = comm.dp

    def __call__(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        rows_by_group: Sequence[int],
    ) -> torch.Tensor:
        """This rank's summand of its group's `[N, D]`."""
        x, expert_ids, expert_weights = self._gather(x, expert_ids, expert_weights, rows_by_group)
        expert_ids = expert_ids - self._bank.first
        rows, columns = (
            ((expert_ids >= 0) & (expert_ids < self._bank.num_experts)).nonzero().unbind(1)
        )
        out = torch.zeros_like(x)
        if rows.numel():
            chosen = expert_ids[rows, columns].unsqueeze(1)
            weights = expert_weights[rows, columns].unsqueeze(1)
            out.index_add_(0, rows, self._bank(x[rows], chosen, weights))
        return self._dp.sum_parts(out, rows_by_group)

    def _gather(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        rows_by_group: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows of all groups, in group order. They travel as bytes, so that one collective carries all three."""
        if self._dp.size == 1:
            return x, expert_ids, expert_weights
        columns = (x, expert_ids.int(), expert_weights.float())
        packed = torch.cat([each.contiguous().view(torch.uint8) for each in columns], dim=1)
        gathered = self._dp.gather_rows(packed, rows_by_group)
        widths = [each.shape[1] * each.element_size() for each in columns]
        x_all, ids_all, weights_all = (
            each.contiguous().view(like.dtype)
            for each, like in zip(torch.split(gathered, widths, dim=1), columns, strict=True)
        )
        return x_all, ids_all.long(), weights_all


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
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        comm: Communicator,
        *,
        is_hash_routed: bool,
    ) -> None:
        hidden = config.hidden_size
        width = config.moe_intermediate_size * config.n_shared_experts
        part = comm.shard.tp_part(width)
        self._tp = comm.tp
        self._limit = config.swiglu_limit
        self._scaling = config.routed_scaling_factor
        self._normalise = config.norm_topk_prob
        self._top_k = config.num_experts_per_tok
        self.gate = weights.floats("gate.weight", config.n_routed_experts, hidden)
        self._router = (HashRouter if is_hash_routed else ScoreRouter)(config, weights)
        shared = weights.under("shared_experts")
        self.shared_w13 = joined_matrix(
            (
                shared.held("w1.weight", width, hidden, rows=part),
                shared.held("w3.weight", width, hidden, rows=part),
            )
        )
        self.shared_w2 = shared.held("w2.weight", hidden, width, columns=part)
        self._no_rows = weights.empty_matrices(0, hidden)
        self.experts = (
            StoredExpertBank(config, weights, comm.shard)
            if weights.stays_stored("experts.0.w1.weight")
            else ExpertBank(config, weights, kernels, comm.shard)
        )
        self._spread = SpreadExperts(self.experts, comm) if comm.shard.mesh.ep > 1 else None

    def __call__(
        self, x: torch.Tensor, token_ids: torch.Tensor, rows_by_group: Sequence[int]
    ) -> torch.Tensor:
        """`x [N, D]` to `[N, D]`; `token_ids [N]` are the rows' input tokens.

        `rows_by_group` are the rows that each data parallel group brings to this call; all of them call it or `join`.
        """
        scores = F.softplus(F.linear(x.float(), self.gate)).sqrt_()
        expert_ids = self._router.choose(scores, token_ids)
        chosen = scores.gather(1, expert_ids)
        if self._normalise:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        shared = self.shared_w2.linear(swiglu(self.shared_w13.linear(x), self._limit))
        weights = chosen * self._scaling
        if self._spread is None:
            routed = self.experts(x, expert_ids, weights)
        else:
            routed = self._spread(x, expert_ids, weights, rows_by_group)
        return self._tp.sum(shared + routed)

    def join(self, rows_by_group: Sequence[int]) -> None:
        """Compute this rank's experts for the rows of other groups, having none."""
        if self._spread is not None:
            ids = torch.empty(0, self._top_k, dtype=torch.int64, device=self._no_rows.device)
            self._spread(self._no_rows, ids, ids.float(), rows_by_group)
