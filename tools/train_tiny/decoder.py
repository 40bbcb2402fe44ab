"""Batched decoding of the target, one position of every row at a time.

All rows stand at the same position, so caches are plain tensors that are written front to back.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny import layers
from tools.train_tiny.attention import project_output
from tools.train_tiny.config import TinyConfig
from tools.train_tiny.layers import rms, rotate
from tools.train_tiny.weights import Weights, block_of


class CompressorCache:
    """Rows that wait for their group to close, and the entries of closed groups."""

    def __init__(self, w: Weights, name: str, ratio: int, rows: int, length: int) -> None:
        self.w, self.ratio = block_of(w, name), ratio
        wide, width = self.w["wkv.weight"].shape[0], self.w["norm.weight"].shape[0]
        self.values = torch.zeros(rows, length, wide)
        self.gates = torch.zeros(rows, length, wide)
        self.entries = torch.zeros(rows, length // ratio, width)

    def append(self, x: Tensor, position: int, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        """Add position `position`; the entries visible to it."""
        ratio, w = self.ratio, self.w
        self.values[:, position] = F.linear(x, w["wkv.weight"])
        gate = F.linear(x, w["wgate.weight"])
        self.gates[:, position] = gate + w["ape"][position % ratio]
        num = (position + 1) // ratio
        if (position + 1) % ratio == 0 and num <= self.entries.shape[1]:
            self.entries[:, num - 1] = self._close(num - 1, cos, sin, eps)
        return self.entries[:, :num]

    def _close(self, entry: int, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        first, width = entry * self.ratio, self.entries.shape[2]
        own = slice(first, first + self.ratio)
        values, gates = self.values[:, own], self.gates[:, own]
        if self.ratio == 4:
            values, gates = values[..., width:], gates[..., width:]
            if entry:
                old = slice(first - self.ratio, first)
                values = torch.cat([self.values[:, old, :width], values], 1)
                gates = torch.cat([self.gates[:, old, :width], gates], 1)
        pooled = (values * torch.softmax(gates, 1)).sum(1)
        return rotate(rms(pooled, eps, self.w["norm.weight"]), cos[first], sin[first])


class LayerCache:
    def __init__(self, w: Weights, ratio: int, rows: int, length: int, config: TinyConfig) -> None:
        self.ratio = ratio
        self.kv = torch.zeros(rows, length, config.head_dim)
        self.main = CompressorCache(w, "attn.compressor", ratio, rows, length) if ratio else None
        name = "attn.indexer.compressor"
        self.index = CompressorCache(w, name, 4, rows, length) if ratio == 4 else None


class BatchDecoder:
    """Target decoding for `rows` rows of at most `length` positions, in fp32."""

    def __init__(self, weights: Weights, config: TinyConfig, rows: int, length: int) -> None:
        self.weights, self.config, self.position = weights, config, 0
        self.tables = {
            flag: layers.rotary_table(config, is_compressed=flag, length=length)
            for flag in (False, True)
        }
        self.blocks = [block_of(weights, f"layers.{i}") for i in range(config.num_hidden_layers)]
        self.caches = [
            LayerCache(w, ratio, rows, length, config)
            for w, ratio in zip(self.blocks, config.compress_ratios, strict=False)
        ]

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits [rows, V] after `tokens` [rows], which take the next position."""
        config, eps = self.config, self.config.rms_norm_eps
        h = self.weights["embed.weight"][tokens].unsqueeze(1).expand(-1, config.hc_mult, -1)
        for w, cache in zip(self.blocks, self.caches, strict=True):
            x, post, comb = layers.hyper_pre(h, w, "attn", config)
            y = self._attend(rms(x, eps, w["attn_norm.weight"]), w, cache)
            h = layers.hyper_post(h, y, post, comb)
            x, post, comb = layers.hyper_pre(h, w, "ffn", config)
            table = w.get("ffn.gate.tid2eid")
            hashed_ids = None if table is None else table[tokens]
            x = rms(x, eps, w["ffn_norm.weight"])
            y, _ = layers.feed_forward(x, w, hashed_ids, config)
            h = layers.hyper_post(h, y, post, comb)
        self.position += 1
        hidden = layers.hyper_head(h, self.weights, config)
        hidden = rms(hidden, eps, self.weights["norm.weight"])
        return F.linear(hidden, self.weights["head.weight"])

    def _attend(self, x: Tensor, w: Weights, cache: LayerCache) -> Tensor:
        config, eps, t = self.config, self.config.rms_norm_eps, self.position
        rows, heads, dim = x.shape[0], config.num_attention_heads, config.head_dim
        cos, sin = self.tables[cache.ratio > 0]
        latent = rms(F.linear(x, w["attn.wq_a.weight"]), eps, w["attn.q_norm.weight"])
        q = rms(F.linear(latent, w["attn.wq_b.weight"]).view(rows, heads, dim), eps)
        q = rotate(q, cos[t], sin[t]) * dim**-0.5
        kv = rms(F.linear(x, w["attn.wkv.weight"]), eps, w["attn.kv_norm.weight"])
        cache.kv[:, t] = rotate(kv, cos[t], sin[t])
        keys = cache.kv[:, max(0, t + 1 - config.sliding_window) : t + 1]
        p = torch.bmm(q, keys.mT).exp()
        out, total = torch.bmm(p, keys), p.sum(-1) + w["attn.attn_sink"].exp()
        if cache.main is not None:
            entries = cache.main.append(x, t, cos, sin, eps)
            p = torch.bmm(q, entries.mT).exp()
            if cache.index is not None:
                p = p * self._select(x, latent, w, cache.index, cos, sin).unsqueeze(1)
            out, total = out + torch.bmm(p, entries), total + p.sum(-1)
        out = rotate(out / total.unsqueeze(-1), cos[t], -sin[t])
        return project_output(out.reshape(rows, -1), w, config)

    def _select(
        self,
        x: Tensor,
        latent: Tensor,
        w: Weights,
        cache: CompressorCache,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Mask [rows, T] of the entries that the indexer picks."""
        config, t = self.config, self.position
        keys = cache.append(x, t, cos, sin, config.rms_norm_eps)
        if keys.shape[1] <= config.index_topk:
            return torch.ones(keys.shape[:2])
        q = F.linear(latent, w["attn.indexer.wq_b.weight"])
        q = rotate(q.view(x.shape[0], config.index_n_heads, -1), cos[t], sin[t])
        weights = F.linear(x, w["attn.indexer.weights_proj.weight"])
        scores = (torch.relu(torch.bmm(q, keys.mT)) * weights.unsqueeze(-1)).sum(1)
        chosen = scores.topk(config.index_topk, -1).indices
        return torch.zeros_like(scores).scatter(-1, chosen, 1.0)
