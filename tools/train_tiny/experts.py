"""Routed experts for training: tokens sorted by expert, one product per expert."""

from typing import Any

import torch
from torch import Tensor

from tools.train_tiny import native

TILE = 64


@torch.library.custom_op("train_tiny::experts", mutates_args=())
def experts(
    x: Tensor, w13: Tensor, w2: Tensor, expert_ids: Tensor, weights: Tensor, limit: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weighted sum of the chosen experts' outputs.

    x [N, D], w13 [E, 2 I, D], w2 [E, D, I], expert_ids and weights [N, K]. Products are made in the
    dtype of x. Returns the fp32 sum [N, D] and what backward needs: gate_up and output per slot,
    the token of each slot and the slot of each choice.
    """
    w13, w2 = w13.to(x.dtype), w2.to(x.dtype)
    spans, token_ids, slots = sort_into_slots(expert_ids, w13.shape[0])
    rows = x.index_select(0, token_ids)
    gate_up = x.new_empty(rows.shape[0], w13.shape[1])
    for e, first, last in spans:
        torch.mm(rows[first:last], w13[e].t(), out=gate_up[first:last])
    act = native.swiglu(gate_up.float(), limit).to(x.dtype)
    out = x.new_empty(rows.shape[0], x.shape[1])
    for e, first, last in spans:
        torch.mm(act[first:last], w2[e].t(), out=out[first:last])
    picked = out.index_select(0, slots.view(-1)).view(*slots.shape, -1)
    return (picked * weights.unsqueeze(-1)).sum(1), gate_up, out, token_ids, slots


@experts.register_fake
def _(
    x: Tensor, w13: Tensor, w2: Tensor, expert_ids: Tensor, weights: Tensor, limit: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_slots = expert_ids.numel() + TILE * w13.shape[0]
    return (
        torch.empty_like(x, dtype=torch.float32),
        x.new_empty(num_slots, w13.shape[1]),
        x.new_empty(num_slots, x.shape[1]),
        expert_ids.new_empty(num_slots),
        torch.empty_like(expert_ids, memory_format=torch.contiguous_format),
    )


def sort_into_slots(
    expert_ids: Tensor, num_experts: int
) -> tuple[list[tuple[int, int, int]], Tensor, Tensor]:
    """Slots ordered by expert: (expert, first, last) spans, the token of a slot, slots [N, K].

    Spans are whole tiles: bf16 products compile a kernel per shape, so shapes must be few. Slots
    that no choice fills belong to token 0 and nobody reads them.
    """
    flat = expert_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    padded = (counts + TILE - 1) // TILE * TILE
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    sorted_slots = torch.arange(flat.numel()) + shift.index_select(0, flat.index_select(0, order))
    token_ids = flat.new_zeros(flat.numel() + TILE * num_experts)
    token_ids[sorted_slots] = order // expert_ids.shape[1]
    slots = torch.empty_like(flat)
    slots[order] = sorted_slots
    spans = [
        (e, last - num, last)
        for e, (num, last) in enumerate(zip(padded.tolist(), ends.tolist(), strict=True))
        if num
    ]
    return spans, token_ids, slots.view(expert_ids.shape)


@torch.library.custom_op("train_tiny::experts_backward", mutates_args=())
def experts_backward(
    grad: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    out: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, w13, w2 and weights."""
    dtype, choices = x.dtype, slots.view(-1)
    w13_low, w2_low, gate_up = w13.to(dtype), w2.to(dtype), gate_up.float()
    counts = torch.bincount(expert_ids.reshape(-1), minlength=w13.shape[0])
    padded = ((counts + TILE - 1) // TILE * TILE).tolist()
    slot_weights = weights.new_zeros(token_ids.numel())
    slot_weights[choices] = weights.reshape(-1)
    grad_rows = grad.index_select(0, token_ids)
    grad_weights = (grad_rows * out).sum(-1).index_select(0, choices).view_as(weights)
    grad_out = grad_rows.mul_(slot_weights.unsqueeze(-1)).to(dtype)
    rows, act = x.index_select(0, token_ids), native.swiglu(gate_up, limit).to(dtype)
    grad_act, grad_x = torch.empty_like(act), torch.empty_like(rows)
    grad_w13, grad_w2 = torch.zeros_like(w13_low), torch.zeros_like(w2_low)
    last = 0
    for e, num in enumerate(padded):
        part, last = slice(last, last + num), last + num
        if num:
            torch.mm(grad_out[part], w2_low[e], out=grad_act[part])
            torch.mm(grad_out[part].t(), act[part], out=grad_w2[e])
    grad_gate_up = native.swiglu_backward(gate_up, grad_act.float(), limit).to(dtype)
    last = 0
    for e, num in enumerate(padded):
        part, last = slice(last, last + num), last + num
        if num:
            torch.mm(grad_gate_up[part], w13_low[e], out=grad_x[part])
            torch.mm(grad_gate_up[part].t(), rows[part], out=grad_w13[e])
    grad_x = grad_x.index_select(0, choices).view(*slots.shape, -1).sum(1)
    return grad_x, grad_w13.float(), grad_w2.float(), grad_weights


@experts_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    out: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x),
        torch.empty_like(w13),
        torch.empty_like(w2),
        torch.empty_like(weights),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w13, w2, expert_ids, weights, limit = inputs
    ctx.save_for_backward(x, w13, w2, expert_ids, weights, *output[1:])
    ctx.limit = limit


def _grad(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    grads = experts_backward(grad.contiguous(), *ctx.saved_tensors, ctx.limit)
    return grads[0], grads[1], grads[2], None, grads[3], None


experts.register_autograd(_grad, setup_context=_setup)
