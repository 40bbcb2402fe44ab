"""A drafter in double precision without cache, batch or ring: the model's formulas, one position and head at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.model.config import ModelConfig

Rows = list[Tensor]
Sublayer = Callable[[Rows], Rows]


@dataclass(frozen=True, slots=True)
class SlowDrafts:
    """What one block gives."""

    hidden: Tensor
    """Collapsed streams before the norm, `[g, D]`."""
    base_logits: Tensor
    """Without the Markov bias, `[g, vocab]`."""
    token_ids: list[int]
    """Greedy drafts, left to right."""
    confidence_logits: Tensor
    """`[g]`."""


class SlowDrafter:
    """Takes official tensors; remembers nothing between drafts."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        self._config = config
        self._tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def draft(
        self, taps: Tensor, anchor: int, num_drafts: int, *, valid_from: int = 0
    ) -> SlowDrafts:
        """Draft behind `anchor`, whose position is `len(taps)`; `taps [n, taps * D]` are those before it."""
        n = len(taps)
        context = range(max(0, n - self._config.sliding_window, valid_from), n)
        main = {p: self._main(taps[p].double()) for p in context}
        ids = [anchor] + [self._config.dspark_noise_token_id] * (num_drafts - 1)
        h = [torch.stack([self._tensors["embed.weight"][i]] * self._config.hc_mult) for i in ids]
        for i in range(self._config.num_drafter_layers):
            h = self._stage(f"mtp.{i}", h, main, n)
        last = f"mtp.{self._config.num_drafter_layers - 1}"
        hidden = torch.stack([self._collapse(streams, f"{last}.hc_head") for streams in h])
        logits = self._rms(hidden, f"{last}.norm.weight") @ self._tensors["head.weight"].T
        token_ids, confidences = self._markov(last, hidden, logits, anchor)
        return SlowDrafts(hidden, logits, token_ids, confidences)

    def _main(self, tap: Tensor) -> Tensor:
        return self._rms(self._matrix("mtp.0.main_proj", tap), "mtp.0.main_norm.weight")

    def _stage(self, stage: str, h: Rows, main: dict[int, Tensor], n: int) -> Rows:
        context = [self._key(stage, x, position) for position, x in main.items()]

        def attend(xs: Rows) -> Rows:
            return self._attend(stage, xs, context, n)

        def feed_forward(xs: Rows) -> Rows:
            return [self._moe(f"{stage}.ffn", x) for x in xs]

        h = self._sublayer(h, f"{stage}.hc_attn", f"{stage}.attn_norm.weight", attend)
        return self._sublayer(h, f"{stage}.hc_ffn", f"{stage}.ffn_norm.weight", feed_forward)

    # Hyper-connections -------------------------------------------------------------------------------------------

    def _sublayer(self, h: Rows, hc: str, norm: str, function: Sublayer) -> Rows:
        mixes = [self._mix(streams, hc) for streams in h]
        xs = [
            self._rms((pre[:, None] * streams).sum(0), norm)
            for streams, (pre, _, _) in zip(h, mixes, strict=True)
        ]
        out = []
        for streams, y, (_, post, comb) in zip(h, function(xs), mixes, strict=True):
            size = len(streams)
            kept = [
                torch.stack([comb[j, k] * streams[j] for j in range(size)]).sum(0)
                for k in range(size)
            ]
            out.append(torch.stack([post[k] * y + kept[k] for k in range(size)]))
        return out

    def _mix(self, streams: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        fn, base, scale = (self._tensors[f"{name}_{part}"] for part in ("fn", "base", "scale"))
        size, eps = len(streams), self._config.hc_eps
        m = fn @ self._rms(streams.flatten())
        pre = torch.sigmoid(m[:size] * scale[0] + base[:size]) + eps
        post = 2 * torch.sigmoid(m[size : 2 * size] * scale[1] + base[size : 2 * size])
        c = (m[2 * size :] * scale[2] + base[2 * size :]).view(size, size)
        c = torch.softmax(c, dim=1) + eps
        for turn in range(self._config.hc_sinkhorn_iters):
            if turn:
                c = c / (c.sum(1, keepdim=True) + eps)
            c = c / (c.sum(0, keepdim=True) + eps)
        return pre, post, c

    def _collapse(self, streams: Tensor, name: str) -> Tensor:
        fn, base, scale = (self._tensors[f"{name}_{part}"] for part in ("fn", "base", "scale"))
        m = fn @ self._rms(streams.flatten())
        weight = torch.sigmoid(m * scale + base) + self._config.hc_eps
        return (weight[:, None] * streams).sum(0)

    # Attention ---------------------------------------------------------------------------------------------------

    def _attend(self, stage: str, xs: Rows, context: Rows, n: int) -> Rows:
        """Every block row sees the same keys: the context and the whole block, later rows included."""
        heads, d, groups = (
            self._config.num_attention_heads,
            self._config.head_dim,
            self._config.o_groups,
        )
        keys = torch.stack([*context, *(self._key(stage, x, n + j) for j, x in enumerate(xs))])
        sink = self._tensors[f"{stage}.attn.attn_sink"].exp()
        wo_a = self._tensors[f"{stage}.attn.wo_a.weight"].view(groups, -1, heads * d // groups)
        outputs = []
        for j, x in enumerate(xs):
            low = self._rms(self._matrix(f"{stage}.attn.wq_a", x), f"{stage}.attn.q_norm.weight")
            queries = self._matrix(f"{stage}.attn.wq_b", low).view(heads, d)
            o = []
            for head in range(heads):
                q = self._rope(self._rms(queries[head]), n + j)
                weights = torch.exp(keys @ q / math.sqrt(d))
                mixed = (weights[:, None] * keys).sum(0) / (weights.sum() + sink[head])
                o.append(self._rope(mixed, -(n + j)))
            grouped = torch.cat(o).view(groups, -1)
            z = torch.cat([wo_a[g] @ grouped[g] for g in range(groups)])
            outputs.append(self._matrix(f"{stage}.attn.wo_b", z))
        return outputs

    def _key(self, stage: str, x: Tensor, position: int) -> Tensor:
        kv = self._matrix(f"{stage}.attn.wkv", x)
        return self._rope(self._rms(kv, f"{stage}.attn.kv_norm.weight"), position)

    def _rope(self, x: Tensor, position: int) -> Tensor:
        """Pairs (2i, 2i + 1) of the last values, by position * theta ** (-2i / dim)."""
        dim = self._config.qk_rope_head_dim
        out = x.clone()
        for i in range(0, dim, 2):
            angle = position * self._config.rope_theta ** (-i / dim)
            a, b = x[i - dim], x[i + 1 - dim]
            out[i - dim] = a * math.cos(angle) - b * math.sin(angle)
            out[i + 1 - dim] = a * math.sin(angle) + b * math.cos(angle)
        return out

    # Experts -----------------------------------------------------------------------------------------------------

    def _moe(self, ffn: str, x: Tensor) -> Tensor:
        scores = torch.log1p(torch.exp(self._matrix(f"{ffn}.gate", x))).sqrt()
        biased = scores + self._tensors[f"{ffn}.gate.bias"]
        chosen = biased.topk(self._config.num_experts_per_tok).indices
        total = scores[chosen].sum()
        out = self._expert(f"{ffn}.shared_experts", x)
        for e in chosen.tolist():
            weight = scores[e] / total * self._config.routed_scaling_factor
            out = out + weight * self._expert(f"{ffn}.experts.{e}", x)
        return out

    def _expert(self, expert: str, x: Tensor) -> Tensor:
        limit = self._config.swiglu_limit
        gate = self._matrix(f"{expert}.w1", x).clamp(max=limit)
        up = self._matrix(f"{expert}.w3", x).clamp(-limit, limit)
        return self._matrix(f"{expert}.w2", gate * torch.sigmoid(gate) * up)

    # Heads -------------------------------------------------------------------------------------------------------

    def _markov(
        self, last: str, hidden: Tensor, logits: Tensor, anchor: int
    ) -> tuple[list[int], Tensor]:
        w1, w2 = (self._tensors[f"{last}.markov_head.markov_w{i}.weight"] for i in (1, 2))
        previous, token_ids, confidences = anchor, [], []
        for x, base in zip(hidden, logits, strict=True):
            embedding = w1[previous]
            previous = int((base + w2 @ embedding).argmax())
            token_ids.append(previous)
            features = torch.cat((x, embedding))
            confidences.append(self._matrix(f"{last}.confidence_head.proj", features)[0])
        return token_ids, torch.stack(confidences)

    def _matrix(self, name: str, x: Tensor) -> Tensor:
        return self._tensors[f"{name}.weight"] @ x

    def _rms(self, x: Tensor, weight: str | None = None) -> Tensor:
        y = x / (x.square().mean(-1, keepdim=True) + self._config.rms_norm_eps).sqrt()
        return y if weight is None else y * self._tensors[weight]
