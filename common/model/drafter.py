"""The DSpark drafter: three V4 stages over a block of noise tokens, a Markov head and a confidence head.

Context never passes through the stages: each stage projects the target's taps to its own key-value rows. The block is
not causal and its rows are thrown away. Letters: B requests, g drafts, C context rows, D hidden size, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.kv_cache.pool import CachePool
from common.model.attention import LatentProjection
from common.model.config import ModelConfig
from common.model.hyper_connections import HyperConnection, HyperHead
from common.model.joined import joined_matrix
from common.model.kernels import Kernels
from common.model.moe import MoE
from common.model.plan import StepPlan
from common.model.rope import window_rope
from common.model.weights import Weights
from common.parallel.collectives import Communicator


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """What the stages give for one block per request."""

    hidden: torch.Tensor
    """Collapsed streams before the final norm, `[B, g, D]`; row k drafts position n + 1 + k."""
    base_logits: torch.Tensor
    """Float32 `[B, g, vocab]`, without the Markov head's bias: this rank's part of the vocabulary."""


class Stage:
    """One drafter stage; tensors under `mtp.{i}.`."""

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: Kernels, comm: Communicator
    ) -> None:
        self._eps = config.rms_norm_eps
        self._kernels = kernels
        self.projection = LatentProjection(config, weights.under("attn"), kernels, comm)
        self._ffn = MoE(config, weights.under("ffn"), kernels, comm, is_hash_routed=False)
        self.attn_norm = weights.matrix("attn_norm.weight", config.hidden_size)
        self.ffn_norm = weights.matrix("ffn_norm.weight", config.hidden_size)
        self._hc_attn = HyperConnection(config, weights, "attn", kernels)
        self._hc_ffn = HyperConnection(config, weights, "ffn", kernels)

    def __call__(
        self,
        h: torch.Tensor,
        token_ids: torch.Tensor,
        rotations: torch.Tensor,
        context: torch.Tensor,
        mask: torch.Tensor,
        rows_by_group: Sequence[int],
    ) -> torch.Tensor:
        """Streams `h [B * g, S, D]` to streams; `context [B, C, d]`, `mask [B, g * H, C + g + 1]`."""
        mix = self._hc_attn.read(h)
        x = self._kernels.rms_norm(mix.x, self.attn_norm, self._eps)
        h = self._hc_attn.write(h, mix, self._attend(x, rotations, context, mask))
        mix = self._hc_ffn.read(h)
        x = self._kernels.rms_norm(mix.x, self.ffn_norm, self._eps)
        return self._hc_ffn.write(h, mix, self._ffn(x, token_ids, rows_by_group))

    def join(self, rows_by_group: Sequence[int]) -> None:
        self._ffn.join(rows_by_group)

    def _attend(
        self, x: torch.Tensor, rotations: torch.Tensor, context: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        batch = context.shape[0]
        q = self.projection.query(self.projection.latent_query(x), rotations)
        kv = self.projection.key_value(x, rotations)
        keys = torch.cat((context, kv.view(batch, -1, kv.shape[-1])), dim=1)
        o = self.projection.attend(q.view(batch, -1, q.shape[-1]), keys, mask)
        return self.projection.output(o.view_as(q), rotations)


class Drafter:
    """All stages and heads. `embed` and `head` are the target's."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        device: torch.device,
        comm: Communicator,
        *,
        embed: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        hidden, rank, vocab = config.hidden_size, config.dspark_markov_rank, config.vocab_size
        first, last = weights.under("mtp.0"), weights.under(f"mtp.{config.num_drafter_layers - 1}")
        self.config = config
        self._kernels = kernels
        self._rope = window_rope(config, device)
        self._embed, self._head = embed, head
        self._stages = [
            Stage(config, weights.under(f"mtp.{i}"), kernels, comm)
            for i in range(config.num_drafter_layers)
        ]
        self.main_proj = first.held(
            "main_proj.weight", hidden, hidden * len(config.dspark_target_layer_ids)
        )
        self.main_norm = first.matrix("main_norm.weight", hidden)
        self.norm = last.matrix("norm.weight", hidden)
        self._hc_head = HyperHead(config, last)
        self.markov_w1 = last.floats("markov_head.markov_w1.weight", vocab, rank)
        self.markov_w2 = last.floats(
            "markov_head.markov_w2.weight", vocab, rank, rows=comm.shard.vocabulary_part(vocab)
        )
        self.confidence = last.floats("confidence_head.proj.weight", 1, hidden + rank)
        # One product gives the context rows of all stages.
        self._context_wkv = joined_matrix([stage.projection.wkv for stage in self._stages])

    def write_context(self, taps: torch.Tensor, plan: StepPlan, cache: CachePool) -> None:
        """Turn the step's taps `[N, taps * D]` into context rows of every stage.

        Rows of rejected drafts are written too; they are overwritten before any block may look at them.
        """
        write = plan.ring_writes["drafter"]
        positions = plan.positions
        if write.source is not None:
            taps, positions = taps[write.source], positions[write.source]
        eps = self.config.rms_norm_eps
        main_x = self._kernels.rms_norm(self.main_proj.linear(taps), self.main_norm, eps)
        rows = self._context_wkv.linear(main_x).chunk(len(self._stages), dim=-1)
        rotations = self._rope.at(positions)
        buffer = cache.buffers["drafter"]
        for i, stage in enumerate(self._stages):
            kv = self._kernels.rms_norm(rows[i].contiguous(), stage.projection.kv_norm, eps)
            kv = self._kernels.rotate(kv.unsqueeze(1), rotations).squeeze(1)
            buffer.layer_rows(i)[write.target] = kv.to(buffer.tensor.dtype)

    def draft_block(
        self,
        anchor_ids: torch.Tensor,
        anchor_positions: torch.Tensor,
        valid_from: torch.Tensor,
        slots: torch.Tensor,
        cache: CachePool,
        num_drafts: int,
        rows_by_group: Sequence[int] = (),
    ) -> BlockOutput:
        """Run the stages on `[anchor, noise …]` at the anchor's position onwards; all arguments `[B]`.

        The anchor is the newest token, not yet run by the target; context are the rows before it, from `valid_from`.
        `rows_by_group` are the block rows of every data parallel group; only a mesh with more than one asks for them.
        """
        batch = anchor_ids.shape[0]
        offsets = torch.arange(num_drafts, device=anchor_ids.device)
        ids = torch.full(
            (batch, num_drafts), self.config.dspark_noise_token_id, device=anchor_ids.device
        )
        ids[:, 0] = anchor_ids
        ids = ids.flatten()
        positions = (anchor_positions.unsqueeze(1) + offsets).flatten()
        # Drafts past the context are cut before they are verified, so any rotation will do for them.
        rotations = self._rope.at(positions.clamp_(max=self.config.max_position_embeddings - 1))
        context_index, mask = self._context(anchor_positions, valid_from, slots, cache, num_drafts)
        buffer = cache.buffers["drafter"]
        h = self._embed[ids].unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        for i, stage in enumerate(self._stages):
            context = (
                buffer.layer_rows(i)[context_index]
                .view(batch, -1, self.config.head_dim)
                .to(h.dtype)
            )
            h = stage(h, ids, rotations, context, mask, rows_by_group)
        x = self._hc_head(h)
        normed = self._kernels.rms_norm(x, self.norm, self.config.rms_norm_eps)
        logits = F.linear(normed.float(), self._head)
        return BlockOutput(x.view(batch, num_drafts, -1), logits.view(batch, num_drafts, -1))

    def join(self, rows_by_group: Sequence[int]) -> None:
        """Take part in the drafting of other data parallel groups; this one drafts nothing."""
        for stage in self._stages:
            stage.join(rows_by_group)

    def markov(self, previous_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bias on the next draft's logits `[B, vocab]`, this rank's part, and the embedding `[B, r]` of the token before it."""
        embedding = self.markov_w1[previous_ids]
        return F.linear(embedding, self.markov_w2), embedding

    def confidence_logits(self, hidden: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Raw confidence `[B, g]` that a draft is accepted, given that those before it are."""
        features = torch.cat((hidden.float(), embeddings), dim=-1)
        return F.linear(features, self.confidence).squeeze(-1)

    def _context(
        self,
        anchor_positions: torch.Tensor,
        valid_from: torch.Tensor,
        slots: torch.Tensor,
        cache: CachePool,
        num_drafts: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ring rows `[B * C]` of the context and the additive mask `[B, g * H, C + g + 1]`, the same for every row."""
        window, heads = self.config.sliding_window, self._stages[0].projection.num_heads
        ring_rows = cache.buffers["drafter"].rows_per_block
        back = torch.arange(-window, 0, device=anchor_positions.device)
        positions = anchor_positions.unsqueeze(1) + back
        index = slots.unsqueeze(1) * ring_rows + positions.remainder(ring_rows)
        mask = torch.zeros(
            anchor_positions.shape[0],
            window + num_drafts + 1,
            dtype=self._embed.dtype,
            device=index.device,
        )
        mask[:, :window].masked_fill_(positions < valid_from.unsqueeze(1), -torch.inf)
        return index.flatten(), mask.unsqueeze(1).expand(-1, num_drafts * heads, -1)
