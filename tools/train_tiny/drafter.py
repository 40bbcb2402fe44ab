"""The DSpark drafter over many anchors of whole rows at once, with gradients.

Letters: B rows, L positions of a row, A anchors per row, K block size, M = B A K.
"""

import functools
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny import layers, native
from tools.train_tiny.attention import project_output
from tools.train_tiny.config import TinyConfig
from tools.train_tiny.layers import rms, rotate
from tools.train_tiny.weights import Weights, block_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    rows: int
    anchors: int
    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOutput:
    """For each of the M block positions."""

    x: Tensor  # [M, D] before the last norm; the confidence head reads it
    hidden: Tensor  # [M, D] normalised; the target's head makes logits of it
    expert_ids: list[Tensor]


class Drafter:
    """Runs the three stages over weights it does not own."""

    def __init__(self, config: TinyConfig, *, max_length: int, compiled: bool = False) -> None:
        self.config = config
        self.cos, self.sin = layers.rotary_table(config, is_compressed=False, length=max_length)
        self._stage = native.compiled(draft_stage) if compiled else draft_stage

    def forward(
        self, weights: Weights, embed: Tensor, taps: Tensor, anchors: Tensor, tokens: Tensor
    ) -> DrafterOutput:
        """taps [B, L, taps x D]; anchors [B, A] positions whose token, `tokens` [B, A], is not run.

        Every block position sees the same keys: the window of positions strictly before the anchor
        and the whole block, later noise included.
        """
        config, block = self.config, self.config.dspark_block_size
        rows, length = taps.shape[:2]
        shape = BlockShape(rows=rows, anchors=anchors.shape[1], block=block)
        noise = torch.full((*anchors.shape, block - 1), config.dspark_noise_token_id)
        ids = torch.cat([tokens.unsqueeze(-1), noise], -1)
        h = embed[ids.view(-1)].unsqueeze(1).expand(-1, config.hc_mult, -1)
        main_x = F.linear(taps.flatten(0, 1), weights["mtp.0.main_proj.weight"])
        main_x = rms(main_x, config.rms_norm_eps, weights["mtp.0.main_norm.weight"])
        position = torch.arange(length).view(1, 1, -1)
        anchor = anchors.unsqueeze(-1)
        mask = ((position < anchor) & (position >= anchor - config.sliding_window)).float()
        block_positions = anchor + torch.arange(block)
        turns = (self.cos[block_positions], self.sin[block_positions])
        expert_ids = []
        for i in range(config.n_mtp_layers):
            w = block_of(weights, f"mtp.{i}")
            keys = (self.cos[:length], self.sin[:length])
            h, ids = self._stage(h, w, main_x, mask, turns, keys, shape, config)
            expert_ids.append(ids)
        last = block_of(weights, f"mtp.{config.n_mtp_layers - 1}")
        x = layers.hyper_head(h, last, config)
        hidden = rms(x, config.rms_norm_eps, last["norm.weight"])
        return DrafterOutput(x=x, hidden=hidden, expert_ids=expert_ids)


def draft_stage(
    h: Tensor,
    w: Weights,
    main_x: Tensor,
    mask: Tensor,
    turns: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    shape: BlockShape,
    config: TinyConfig,
) -> tuple[Tensor, Tensor]:
    """One stage over streams [M, 4, D]: streams and expert ids."""
    eps = config.rms_norm_eps
    x, post, comb = layers.hyper_pre(h, w, "attn", config)
    x = rms(x, eps, w["attn_norm.weight"])
    y = attend_block(x, w, main_x, mask, turns, keys, shape, config)
    h = layers.hyper_post(h, y, post, comb)
    x, post, comb = layers.hyper_pre(h, w, "ffn", config)
    x = rms(x, eps, w["ffn_norm.weight"])
    y, expert_ids = layers.feed_forward(x, w, None, config)
    return layers.hyper_post(h, y, post, comb), expert_ids


def attend_block(
    x: Tensor,
    w: Weights,
    main_x: Tensor,
    mask: Tensor,
    turns: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    shape: BlockShape,
    config: TinyConfig,
) -> Tensor:
    """Attention of block positions [M, D] to the context before the anchor and to the block."""
    rows, anchors, block = shape.rows, shape.anchors, shape.block
    heads, dim, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
    cos, sin = turns
    latent = rms(F.linear(x, w["attn.wq_a.weight"]), eps, w["attn.q_norm.weight"])
    q = F.linear(latent, w["attn.wq_b.weight"]).view(rows, anchors, block, heads, dim)
    q = rotate(rms(q, eps), cos.unsqueeze(3), sin.unsqueeze(3)) * dim**-0.5
    own = rms(F.linear(x, w["attn.wkv.weight"]), eps, w["attn.kv_norm.weight"])
    own = rotate(own.view(rows, anchors, block, dim), cos, sin)
    context = rms(F.linear(main_x, w["attn.wkv.weight"]), eps, w["attn.kv_norm.weight"])
    context = rotate(context.view(rows, -1, dim), *keys)

    scores = torch.bmm(q.view(rows, anchors * block * heads, dim), context.mT)
    p = scores.view(rows, anchors, block * heads, -1).exp() * mask.unsqueeze(2)
    total = p.sum(-1, dtype=torch.float32)
    out = torch.bmm(p.view(rows, anchors * block * heads, -1), context)
    own = own.view(rows * anchors, block, dim)
    p = torch.bmm(q.view(rows * anchors, block * heads, dim), own.mT).exp()
    total = total.view(rows * anchors, block, heads) + p.sum(-1, dtype=torch.float32).view(
        rows * anchors, block, heads
    )
    total = total + w["attn.attn_sink"].exp()
    out = out.view(rows * anchors, block * heads, dim) + torch.bmm(p, own)
    out = out.view(rows, anchors, block, heads, dim) / total.view(rows, anchors, block, heads, 1)
    out = rotate(out, cos.unsqueeze(3), -sin.unsqueeze(3))
    return project_output(out.reshape(rows * anchors * block, -1), w, config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One proposal per row, drawn token after token."""

    tokens: Tensor  # [B, K]
    probabilities: Tensor  # [B, K, V] what each token was drawn from
    confidence_logits: Tensor  # [B, K]


@torch.no_grad()
def propose(
    drafter: Drafter,
    weights: Weights,
    target: Weights,
    taps: Tensor,
    anchors: Tensor,
    tokens: Tensor,
    temperature: float,
    generator: torch.Generator,
) -> Draft:
    """Draft a block for each row; `anchors` and `tokens` are [B]."""
    config = drafter.config
    block, last = config.dspark_block_size, f"mtp.{config.n_mtp_layers - 1}"
    output = drafter.forward(
        weights, target["embed.weight"], taps, anchors.unsqueeze(1), tokens.unsqueeze(1)
    )
    base = F.linear(output.hidden, target["head.weight"]).view(len(tokens), block, -1)
    x = output.x.view(len(tokens), block, -1)
    w1 = weights[f"{last}.markov_head.markov_w1.weight"]
    w2 = weights[f"{last}.markov_head.markov_w2.weight"]
    proj = weights[f"{last}.confidence_head.proj.weight"]
    drafted, kept, confidences, previous = [], [], [], tokens
    for k in range(block):
        memory = w1[previous]
        logits = base[:, k] + F.linear(memory, w2)
        confidences.append(F.linear(torch.cat([x[:, k], memory], -1), proj).squeeze(1))
        if temperature == 0:
            previous = logits.argmax(-1)
            kept.append(F.one_hot(previous, logits.shape[-1]).float())
        else:
            kept.append(torch.softmax(logits / temperature, -1))
            previous = torch.multinomial(kept[-1], 1, generator=generator).squeeze(1)
        drafted.append(previous)
    return Draft(
        tokens=torch.stack(drafted, 1),
        probabilities=torch.stack(kept, 1),
        confidence_logits=torch.stack(confidences, 1),
    )


def draft_slope(
    base: Tensor, memory: Tensor, wanted: Tensor, weights: Tensor, share: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the weighted loss by the logits, the loss and the L1 distance of 512 positions."""
    log_q = (base.float() + memory.float()).log_softmax(-1)
    p, q = wanted.float().softmax(-1), log_q.exp()
    difference = q - p
    sign = difference.sign()
    slope = q * (sign - (q * sign).sum(-1, keepdim=True))
    grad = weights * (share * difference + (1 - share) * slope)
    distance = difference.abs().sum(-1)
    loss = share * -(p * log_q).sum(-1) + (1 - share) * distance
    return grad.bfloat16(), loss, distance


fast_draft_slope = functools.cache(lambda: native.compiled(draft_slope))


def draft_loss(
    hidden: Tensor,
    memory: Tensor,
    w2: Tensor,
    head: Tensor,
    target_hidden: Tensor,
    weights: Tensor,
    entropy_share: float,
) -> tuple[Tensor, Tensor]:
    """Weighted loss per position [M], and half the L1 distance [M], which carries no gradient.

    hidden and target_hidden [M, D], memory [M, r] of the previous token, w2 [V, r], head [V, D].
    The gradient is that of sum(loss); the loss is `entropy_share` of cross-entropy and the rest
    of L1.
    """
    pair = DraftLoss.apply(  # type: ignore[no-untyped-call]
        hidden, memory, w2, head, target_hidden, weights, entropy_share
    )
    return cast(tuple[Tensor, Tensor], pair)


class DraftLoss(torch.autograd.Function):
    """Distance of drafted to target distributions in slices; gradients are made at once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        memory: Tensor,
        w2: Tensor,
        head: Tensor,
        target_hidden: Tensor,
        weights: Tensor,
        entropy_share: float,
    ) -> tuple[Tensor, Tensor]:
        losses, distances = [], []
        grad_hidden, grad_memory = torch.empty_like(hidden), torch.empty_like(memory)
        grad_w2 = torch.zeros_like(w2)
        low_head, low_w2 = head.bfloat16(), w2.bfloat16()
        share = torch.tensor(entropy_share)
        for first in range(0, hidden.shape[0], 512):
            part = slice(first, first + 512)
            low, low_memory = hidden[part].bfloat16(), memory[part].bfloat16()
            grad, loss, distance = fast_draft_slope()(
                low @ low_head.t(),
                low_memory @ low_w2.t(),
                target_hidden[part].bfloat16() @ low_head.t(),
                weights[part, None],
                share,
            )
            grad_hidden[part] = (grad @ low_head).float()
            grad_memory[part] = (grad @ low_w2).float()
            grad_w2 += (grad.t() @ low_memory).float()
            losses.append(loss)
            distances.append(0.5 * distance)
        ctx.save_for_backward(grad_hidden, grad_memory, grad_w2)
        half_l1 = torch.cat(distances)
        ctx.mark_non_differentiable(half_l1)
        return torch.cat(losses) * weights, half_l1

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.saved_tensors, None, None, None, None)
