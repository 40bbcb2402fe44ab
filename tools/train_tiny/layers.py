"""What every block is made of: norms, rotary positions, hyper-connections, experts."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny import native
from tools.train_tiny.config import TinyConfig
from tools.train_tiny.experts import experts
from tools.train_tiny.weights import Weights


def rms(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def rotary_table(config: TinyConfig, *, is_compressed: bool, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin [length, rope / 2]; yarn only where the layer compresses."""
    half = config.qk_rope_head_dim // 2
    theta = config.compress_rope_theta if is_compressed else config.rope_theta
    index = torch.arange(half, dtype=torch.float64)
    frequency = theta ** (-index / half)
    if is_compressed:
        low, high = (
            _yarn_bound(config, beta, theta)
            for beta in (config.yarn_beta_fast, config.yarn_beta_slow)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), 2 * half - 1)
        ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
        frequency = frequency / config.yarn_factor * ramp + frequency * (1 - ramp)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency.float().double()
    return angle.cos().float(), angle.sin().float()


def _yarn_bound(config: TinyConfig, beta: float, theta: float) -> float:
    dim, length = config.qk_rope_head_dim, config.yarn_original_length
    return dim * math.log(length / (beta * 2 * math.pi)) / (2 * math.log(theta))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the trailing pairs (2 i, 2 i + 1); cos and sin broadcast against [..., rope / 2]."""
    rope = 2 * cos.shape[-1]
    plain, pairs = x[..., :-rope], torch.unflatten(x[..., -rope:], -1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([plain, turned], -1)


def hyper_pre(
    h: Tensor, w: Weights, part: str, config: TinyConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Sublayer input [N, D], and how its output is written (post [N, 4], mix [N, 4, 4])."""
    n = config.hc_mult
    flat = h.flatten(1)
    scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    mixes = F.linear(flat, w[f"hc_{part}_fn"]).float() * scale
    base, scales = w[f"hc_{part}_base"], w[f"hc_{part}_scale"]
    pre = torch.sigmoid(mixes[:, :n] * scales[0] + base[:n]) + config.hc_eps
    post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scales[1] + base[n : 2 * n])
    comb = torch.unflatten(mixes[:, 2 * n :] * scales[2] + base[2 * n :], -1, (n, n))
    comb = torch.softmax(comb, -1) + config.hc_eps
    comb = native.sinkhorn(comb, config.hc_sinkhorn_iters, config.hc_eps)
    return (pre.unsqueeze(-1) * h).sum(1), post, comb


def hyper_post(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """out[k] = post[k] y + sum_j comb[j, k] h[j]."""
    mixed = (comb.unsqueeze(-1) * h.unsqueeze(2)).sum(1)
    return post.unsqueeze(-1) * y.unsqueeze(1) + mixed


def hyper_head(h: Tensor, w: Weights, config: TinyConfig) -> Tensor:
    """Streams [N, 4, D] to one hidden vector [N, D]."""
    flat = h.flatten(1)
    scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    mixes = F.linear(flat, w["hc_head_fn"]) * scale
    pre = torch.sigmoid(mixes * w["hc_head_scale"] + w["hc_head_base"]) + config.hc_eps
    return (pre.unsqueeze(-1) * h).sum(1)


def feed_forward(
    x: Tensor, w: Weights, hashed_ids: Tensor | None, config: TinyConfig
) -> tuple[Tensor, Tensor]:
    """Shared and routed experts of x [N, D]; also the chosen expert ids [N, K]."""
    limit = config.swiglu_limit
    scores = torch.sqrt(F.softplus(F.linear(x, w["ffn.gate.weight"]).float()))
    if hashed_ids is None:
        expert_ids = torch.topk(scores + w["ffn.gate.bias"], config.num_experts_per_tok).indices
    else:
        expert_ids = hashed_ids
    chosen = scores.gather(1, expert_ids)
    chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    low = x.bfloat16() if torch.is_autocast_enabled("cpu") else x
    routed = experts(low, w["ffn.experts.w13"], w["ffn.experts.w2"], expert_ids, chosen, limit)[0]
    gate = F.linear(x, w["ffn.shared_experts.w1.weight"]).clamp(max=limit)
    up = F.linear(x, w["ffn.shared_experts.w3.weight"]).clamp(-limit, limit)
    shared = F.linear(F.silu(gate) * up, w["ffn.shared_experts.w2.weight"])
    return routed + shared, expert_ids
