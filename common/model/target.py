"""The target: DeepSeek-V4 over flattened rows of many requests. A prompt chunk, a verify block and a decode row are one path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.kv_cache.pool import CachePool
from common.model.attention import Attention
from common.model.config import ModelConfig
from common.model.hyper_connections import HyperConnection, HyperHead
from common.model.kernels import Kernels
from common.model.moe import MoE
from common.model.plan import StepPlan
from common.model.rope import compressed_rope, window_rope
from common.model.weights import Weights
from common.parallel.collectives import Communicator


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What a forward pass gives."""

    logits: torch.Tensor
    """Float32, one row for each row asked for, `[rows, vocab]`: this rank's part of the vocabulary."""
    taps: torch.Tensor
    """Mean over streams of each tapped layer's output, concatenated, `[N, taps * D]`."""


class Layer:
    """One decoder layer; tensors under `layers.{i}.`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        layer_id: int,
        attention: Attention,
        kernels: Kernels,
        comm: Communicator,
    ) -> None:
        self._eps = config.rms_norm_eps
        self._kernels = kernels
        self._attention = attention
        self._ffn = MoE(
            config,
            weights.under("ffn"),
            kernels,
            comm,
            is_hash_routed=layer_id < config.num_hash_layers,
        )
        self.attn_norm = weights.matrix("attn_norm.weight", config.hidden_size)
        self.ffn_norm = weights.matrix("ffn_norm.weight", config.hidden_size)
        self._hc_attn = HyperConnection(config, weights, "attn", kernels)
        self._hc_ffn = HyperConnection(config, weights, "ffn", kernels)

    def __call__(
        self,
        h: torch.Tensor,
        token_ids: torch.Tensor,
        rotations: torch.Tensor,
        plan: StepPlan,
        cache: CachePool,
    ) -> torch.Tensor:
        """Streams `h [N, S, D]` to streams."""
        mix = self._hc_attn.read(h)
        x = self._kernels.rms_norm(mix.x, self.attn_norm, self._eps)
        h = self._hc_attn.write(h, mix, self._attention(x, rotations, plan, cache))
        mix = self._hc_ffn.read(h)
        x = self._kernels.rms_norm(mix.x, self.ffn_norm, self._eps)
        return self._hc_ffn.write(h, mix, self._ffn(x, token_ids, plan.rows_by_group))

    def join(self, rows_by_group: Sequence[int]) -> None:
        self._ffn.join(rows_by_group)


class Target:
    """The whole target model. Stateless: all that it remembers is in the cache it is given."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        device: torch.device,
        comm: Communicator,
    ) -> None:
        self.config = config
        self._kernels = kernels
        self._ropes = {
            0: window_rope(config, device),
            4: (rope := compressed_rope(config, device)),
            128: rope,
        }
        self.embed = weights.matrix("embed.weight", config.vocab_size, config.hidden_size)
        self._layers = [
            Layer(
                config,
                layer := weights.under(f"layers.{i}"),
                i,
                Attention(
                    config,
                    layer.under("attn"),
                    i,
                    self._ropes[config.compress_ratios[i]],
                    kernels,
                    comm,
                ),
                kernels,
                comm,
            )
            for i in range(config.num_hidden_layers)
        ]
        self._hc_head = HyperHead(config, weights)
        self.norm = weights.matrix("norm.weight", config.hidden_size)
        self.head = weights.floats(
            "head.weight",
            config.vocab_size,
            config.hidden_size,
            rows=comm.shard.vocabulary_part(config.vocab_size),
        )

    def forward(
        self, token_ids: torch.Tensor, plan: StepPlan, cache: CachePool, logit_rows: torch.Tensor
    ) -> TargetOutput:
        """Run `token_ids [N]` at the plan's positions; logits are computed for `logit_rows` only."""
        h = self.embed[token_ids].unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        plain, compressed = (self._ropes[r].at(plan.positions) for r in (0, 4))
        taps = []
        for i, layer in enumerate(self._layers):
            h = layer(
                h, token_ids, compressed if self.config.compress_ratios[i] else plain, plan, cache
            )
            if i in self.config.dspark_target_layer_ids:
                taps.append(h.mean(1))
        x = self._hc_head(h[logit_rows])
        logits = F.linear(
            self._kernels.rms_norm(x, self.norm, self.config.rms_norm_eps).float(), self.head
        )
        return TargetOutput(logits, torch.cat(taps, dim=-1) if taps else h.new_empty(h.shape[0], 0))

    def join(self, rows_by_group: Sequence[int]) -> None:
        """Take part in a forward pass of other data parallel groups; this one has no rows in it."""
        for layer in self._layers:
            layer.join(rows_by_group)
