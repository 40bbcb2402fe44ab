"""Chooses which ratio-4 rows a query attends to: many small heads score the compressed keys, the best are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.kv_cache.pool import CachePool
from common.model.compressor import Compressor
from common.model.config import ModelConfig
from common.model.kernels import Kernels
from common.model.plan import AttentionGroup, CompressedKeys, StepPlan
from common.model.rope import RopeTable
from common.model.weights import Weights


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Rows that each query attends to."""

    row_index: torch.Tensor
    """Rows of the paged region, pages flattened, `[B, L, k]`."""
    mask: torch.Tensor
    """Additive, `[B, L, k]`; -inf where a query sees fewer than k rows."""


class Indexer:
    """The indexer of one ratio-4 layer; tensors under `attn.indexer.`."""

    def __init__(
        self, config: ModelConfig, weights: Weights, rope: RopeTable, kernels: Kernels
    ) -> None:
        self._kernels = kernels
        self.topk = config.index_topk
        self._heads = config.index_n_heads
        self._dim = config.index_head_dim
        self.wq_b = weights.held("wq_b.weight", self._heads * self._dim, config.q_lora_rank)
        self.weights_proj = weights.matrix("weights_proj.weight", self._heads, config.hidden_size)
        self._compressor = Compressor(
            config,
            weights.under("compressor"),
            ratio=4,
            width=self._dim,
            rope=rope,
            kernels=kernels,
        )

    def compress(self, x: torch.Tensor, plan: StepPlan, cache: CachePool, index: int) -> None:
        """Write the index keys that close in this step."""
        self._compressor(
            x,
            plan,
            tail=cache.buffers["index_tail"].layer_rows(index),
            tail_region="index_tail",
            pages=cache.buffers["index"].layer_rows(index),
        )

    def choose(
        self,
        x: torch.Tensor,
        latent: torch.Tensor,
        rotations: torch.Tensor,
        group: AttentionGroup,
        compressed: CompressedKeys,
        cache: CachePool,
        index: int,
    ) -> ChosenRows:
        """The `topk` visible rows with the highest scores, lower rows first among equals."""
        batch, width = group.shape
        q = self.wq_b.linear(latent).view(-1, self._heads, self._dim)
        q = self._kernels.rotate(q, rotations)
        weights = F.linear(x, self.weights_proj).float() * (self._dim**-0.5 * self._heads**-0.5)
        if group.row_index is not None:
            q, weights = q[group.row_index], weights[group.row_index]
        keys = cache.buffers["index"].layer_rows(index)[
            compressed.row_index
        ]  # [B, M, index_head_dim]
        scores = torch.bmm(
            q.float().reshape(batch, -1, self._dim), keys.float().transpose(1, 2)
        ).relu_()
        scores = scores.view(batch, width, self._heads, -1)
        scores = torch.matmul(weights.view(batch, width, 1, self._heads), scores).squeeze(2)
        scores.masked_fill_(compressed.invisible, -torch.inf)
        # ReLU makes exact ties at zero; a stable sort keeps the choice independent of padding and batch.
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        best = order[..., : self.topk]
        rows = compressed.row_index.unsqueeze(1).expand(-1, width, -1).gather(2, best)
        hidden = ordered[..., : self.topk] == -torch.inf
        mask = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device).masked_fill_(
            hidden, -torch.inf
        )
        return ChosenRows(rows, mask)
