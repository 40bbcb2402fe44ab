"""V4 attention: one latent key-value head, a sliding window, compressed rows, a sink per head.

Caches are passed in and addressed through the plan; nothing here remembers a token. Letters: N rows, H heads,
d head_dim, G output groups, of which H and G are this rank's; B, L, K, M as in `plan`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.kv_cache.pool import CachePool
from common.model.compressor import Compressor
from common.model.config import ModelConfig
from common.model.grouped import grouped
from common.model.indexer import Indexer
from common.model.kernels import Kernels
from common.model.plan import AttentionGroup, StepPlan
from common.model.rope import RopeTable
from common.model.weights import Weights
from common.parallel.collectives import Communicator


class LatentProjection:
    """Query, key-value and output projections, which target layers and drafter stages share in form.

    Latent rows are computed by every rank of a group; heads, and the output groups that read them, are spread over them.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: Kernels, comm: Communicator
    ) -> None:
        heads, d, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
        groups, rank = config.o_groups, config.o_lora_rank
        part, tp = comm.shard.tp_part, comm.shard.mesh.tp
        self.num_heads = heads // tp
        self._tp = comm.tp
        self._head_dim = d
        self._eps = config.rms_norm_eps
        self._kernels = kernels
        self.wq_a = weights.held("wq_a.weight", config.q_lora_rank, hidden)
        self.q_norm = weights.matrix("q_norm.weight", config.q_lora_rank)
        self.wq_b = weights.held("wq_b.weight", heads * d, config.q_lora_rank, rows=part(heads * d))
        self.wkv = weights.held("wkv.weight", d, hidden)
        self.kv_norm = weights.matrix("kv_norm.weight", d)
        self._num_groups = groups // tp
        wo_a = weights.held(
            "wo_a.weight", groups * rank, heads * d // groups, rows=part(groups * rank)
        )
        self.wo_a = grouped(wo_a, rank)
        self.wo_b = weights.held("wo_b.weight", hidden, groups * rank, columns=part(groups * rank))
        # Queries are normalised without a weight of their own; the attention scale takes its place.
        self._query_scale = torch.full(
            (d,), d**-0.5, dtype=self.kv_norm.dtype, device=self.kv_norm.device
        )
        self.attn_sink = weights.floats("attn_sink", heads, rows=part(heads))

    def latent_query(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, D]` to the low-rank query `[N, q_lora_rank]`, which the indexer reads as well."""
        return self._kernels.rms_norm(self.wq_a.linear(x), self.q_norm, self._eps)

    def query(self, latent: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Rotated queries `[N, H, d]`, already scaled by d ** -0.5."""
        q = self.wq_b.linear(latent).view(-1, self._head_dim)
        q = self._kernels.rms_norm(q, self._query_scale, self._eps)
        return self._kernels.rotate(q.view(-1, self.num_heads, self._head_dim), rotations)

    def key_value(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Rotated latent rows `[N, d]`, key and value at once."""
        kv = self._kernels.rms_norm(self.wkv.linear(x), self.kv_norm, self._eps)
        return self._kernels.rotate(kv.unsqueeze(1), rotations).squeeze(1)

    def output(self, o: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """`o [N, H, d]` to `[N, D]`: rotation undone, then the grouped low-rank projection."""
        o = self._kernels.rotate(o, rotations, inverse=True)
        low_rank = self.wo_a.linear(o.view(o.shape[0], self._num_groups, -1))
        return self._tp.sum(self.wo_b.linear(low_rank))

    def attend(self, q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Softmax attention with a sink.

        `q [B, L * H, d]`, `keys [B, K, d]` are values as well, `mask [B, L * H, K + 1]` is additive with the sink
        column last. Returns `[B, L * H, d]`.
        """
        keys = F.pad(
            keys, (0, 0, 0, 1)
        )  # the sink column: a zero row, so it adds to the denominator only
        scores = torch.baddbmm(mask, q, keys.transpose(1, 2))
        batch, rows, _ = scores.shape
        scores.view(batch, rows // self.num_heads, self.num_heads, -1)[..., -1] = self.attn_sink
        return torch.bmm(scores.softmax(-1, dtype=torch.float32).to(q.dtype), keys)


class Attention:
    """The attention sublayer of one target layer; tensors under `attn.`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        layer_id: int,
        rope: RopeTable,
        kernels: Kernels,
        comm: Communicator,
    ) -> None:
        self._ratio = config.compress_ratios[layer_id]
        self._layer_id = layer_id
        self._rope = rope
        self.projection = LatentProjection(config, weights, kernels, comm)
        self._compressor: Compressor | None = None
        self._indexer: Indexer | None = None
        if self._ratio:
            self._compressed_index = config.layers_with_ratio(self._ratio).index(layer_id)
            self._compressor = Compressor(
                config,
                weights.under("compressor"),
                ratio=self._ratio,
                width=config.head_dim,
                rope=rope,
                kernels=kernels,
            )
        if self._ratio == 4:
            self._indexer = Indexer(config, weights.under("indexer"), rope, kernels)

    def __call__(
        self, x: torch.Tensor, rotations: torch.Tensor, plan: StepPlan, cache: CachePool
    ) -> torch.Tensor:
        """`x [N, D]` to `[N, D]`; reads and writes the layer's rows in `cache`."""
        latent = self.projection.latent_query(x)
        q = self.projection.query(latent, rotations)
        kv = self.projection.key_value(x, rotations)
        self._compress(x, plan, cache)
        window = cache.buffers["window"].layer_rows(self._layer_id)
        out = self._attend(x, latent, q, kv, window, rotations, plan, cache)
        # Written last: a chunk longer than the ring overwrites rows that its own first rows still look at.
        plan.ring_writes["window"].apply(window, kv)
        return self.projection.output(out, rotations)

    def _compress(self, x: torch.Tensor, plan: StepPlan, cache: CachePool) -> None:
        if self._compressor is None:
            return
        index, name = self._compressed_index, "csa" if self._ratio == 4 else "hca"
        self._compressor(
            x,
            plan,
            tail=cache.buffers[f"{name}_tail"].layer_rows(index),
            tail_region=f"{name}_tail",
            pages=cache.buffers[name].layer_rows(index),
        )
        if self._indexer is not None:
            self._indexer.compress(x, plan, cache, index)

    def _attend(
        self,
        x: torch.Tensor,
        latent: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        window: torch.Tensor,
        rotations: torch.Tensor,
        plan: StepPlan,
        cache: CachePool,
    ) -> torch.Tensor:
        out = torch.empty_like(q) if len(plan.groups) > 1 else None
        for group in plan.groups:
            batch, width = group.shape
            group_q = _gather(q, group.row_index).view(batch, width, self.projection.num_heads, -1)
            past = window[group.past_index].view(batch, -1, kv.shape[-1]).to(kv.dtype)
            keys = torch.cat((past, _gather(kv, group.row_index).view(batch, width, -1)), dim=1)
            o = self._attend_group(x, latent, group_q, keys, rotations, group, cache)
            o = o.view(batch * width, self.projection.num_heads, -1)
            if group.scatter_from is not None:
                o = o[group.scatter_from]
            if out is None:
                return o
            assert group.scatter_to is not None
            out[group.scatter_to] = o
        assert out is not None
        return out

    def _attend_group(
        self,
        x: torch.Tensor,
        latent: torch.Tensor,
        q: torch.Tensor,
        keys: torch.Tensor,
        rotations: torch.Tensor,
        group: AttentionGroup,
        cache: CachePool,
    ) -> torch.Tensor:
        flat_q = q.flatten(1, 2)
        compressed = group.compressed.get(self._ratio)
        if compressed is None:
            return self.projection.attend(flat_q, keys, group.window_mask)
        pages = cache.buffers["csa" if self._ratio == 4 else "hca"].layer_rows(
            self._compressed_index
        )
        if self._indexer is None or compressed.row_index.shape[1] <= self._indexer.topk:
            rows = pages[compressed.row_index].to(keys.dtype)
            return self.projection.attend(
                flat_q, torch.cat((keys, rows), dim=1), compressed.dense_mask
            )
        chosen = self._indexer.choose(
            x, latent, rotations, group, compressed, cache, self._compressed_index
        )
        rows = pages[chosen.row_index].to(keys.dtype)
        return self._attend_chosen(q, keys, rows, chosen.mask, group.window_mask)

    def _attend_chosen(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        rows: torch.Tensor,
        chosen_mask: torch.Tensor,
        window_mask: torch.Tensor,
    ) -> torch.Tensor:
        """Window keys `[B, K, d]` are shared by a request's rows, chosen rows `[B, L, k, d]` are each row's own."""
        batch, width, heads, d = q.shape
        keys = F.pad(keys, (0, 0, 0, 1))
        near = torch.baddbmm(window_mask, q.flatten(1, 2), keys.transpose(1, 2)).view(
            batch, width, heads, -1
        )
        near[..., -1] = self.projection.attn_sink
        far = torch.matmul(q, rows.transpose(2, 3)) + chosen_mask.unsqueeze(2)
        p = torch.cat((near, far), dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
        p_near, p_far = p[..., : near.shape[-1]], p[..., near.shape[-1] :]
        return torch.bmm(p_near.flatten(1, 2), keys).view(batch, width, heads, d) + torch.matmul(
            p_far, rows
        )


def _gather(rows: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return rows if index is None else rows[index]
