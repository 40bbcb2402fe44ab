"""The target's training forward: whole rows at once, with gradients, in fp32."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tools.train_tiny import layers, native
from tools.train_tiny.attention import QUERY_BLOCK, Shape, attend
from tools.train_tiny.config import TinyConfig
from tools.train_tiny.weights import Weights, block_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput:
    """What one pass over rows leaves behind."""

    hidden: Tensor  # [N, D] normalised; the head makes logits of it
    taps: list[Tensor]  # per tapped layer [N, D]: mean of the streams it outputs
    index_loss: Tensor
    expert_ids: list[Tensor]  # per layer [N, K]


class Target:
    """Runs the target over weights it does not own; `compiled` trades minutes of start for speed."""

    def __init__(self, config: TinyConfig, *, max_length: int, compiled: bool = False) -> None:
        self.config = config
        self.tables = {
            is_compressed: layers.rotary_table(
                config, is_compressed=is_compressed, length=max_length
            )
            for is_compressed in (False, True)
        }
        self._block = native.compiled(target_block) if compiled else target_block

    def forward(self, weights: Weights, tokens: Tensor) -> TargetOutput:
        """tokens [rows, length]; a length that fills no whole query block is padded on the right."""
        rows, given = tokens.shape
        length = -(-given // QUERY_BLOCK) * QUERY_BLOCK
        tokens = torch.nn.functional.pad(tokens, (0, length - given))
        config, flat = self.config, tokens.reshape(-1)
        shape = Shape(rows=rows, length=length)
        h = weights["embed.weight"][flat].unsqueeze(1).expand(-1, config.hc_mult, -1)
        taps, expert_ids, index_loss = [], [], h.new_zeros(())
        for i in range(config.num_hidden_layers):
            ratio, block = config.compress_ratios[i], block_of(weights, f"layers.{i}")
            table = block.pop("ffn.gate.tid2eid", None)
            hashed_ids = None if table is None else table[flat]
            cos, sin = self.tables[ratio > 0]
            h, loss, ids = self._block(h, block, cos, sin, hashed_ids, shape, ratio, config)
            index_loss = index_loss + loss
            expert_ids.append(ids)
            if i in config.dspark_target_layer_ids:
                taps.append(_cut(h.mean(1), shape, given))
        hidden = layers.hyper_head(h, weights, config)
        hidden = layers.rms(hidden, config.rms_norm_eps, weights["norm.weight"])
        return TargetOutput(
            hidden=_cut(hidden, shape, given),
            taps=taps,
            index_loss=index_loss,
            expert_ids=expert_ids,
        )


def target_block(
    h: Tensor,
    w: Weights,
    cos: Tensor,
    sin: Tensor,
    hashed_ids: Tensor | None,
    shape: Shape,
    ratio: int,
    config: TinyConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer over streams [N, 4, D]: streams, indexer loss, expert ids."""
    eps = config.rms_norm_eps
    x, post, comb = layers.hyper_pre(h, w, "attn", config)
    x = layers.rms(x, eps, w["attn_norm.weight"])
    y, index_loss = attend(x, w, cos, sin, shape, ratio, config)
    h = layers.hyper_post(h, y, post, comb)
    x, post, comb = layers.hyper_pre(h, w, "ffn", config)
    x = layers.rms(x, eps, w["ffn_norm.weight"])
    y, expert_ids = layers.feed_forward(x, w, hashed_ids, config)
    return layers.hyper_post(h, y, post, comb), index_loss, expert_ids


def _cut(x: Tensor, shape: Shape, length: int) -> Tensor:
    return x.view(shape.rows, shape.length, -1)[:, :length].reshape(shape.rows * length, -1)


def head_loss(x: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """x [N, D], head [V, D], labels and weights [N]; the loss per token [N], unweighted.

    Call backward on the plain sum of the losses: the gradient that comes back is already that of
    the weighted sum.
    """
    losses = HeadLoss.apply(x, head, labels, weights)  # type: ignore[no-untyped-call]
    return cast(Tensor, losses)


class HeadLoss(torch.autograd.Function):
    """Weighted cross-entropy of the head in slices that stay in cache; gradients are made at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        losses, grad_x, grad_head = [], torch.empty_like(x), torch.zeros_like(head)
        low_head = head.bfloat16()
        for rows in torch.split(torch.arange(x.shape[0]), 512):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            low = x[part].bfloat16()
            logits = (low @ low_head.t()).float()
            log_total = logits.logsumexp(-1, keepdim=True)
            losses.append(log_total.squeeze(1) - logits.gather(1, labels[part, None]).squeeze(1))
            grad = logits.sub_(log_total).exp_()
            grad.scatter_add_(1, labels[part, None], grad.new_full((len(rows), 1), -1.0))
            grad = grad.mul_(weights[part, None]).bfloat16()
            grad_x[part] = (grad @ low_head).float()
            grad_head += (grad.t() @ low).float()
        ctx.save_for_backward(grad_x, grad_head)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_x, grad_head = ctx.saved_tensors
        return grad_x, grad_head, None, None
