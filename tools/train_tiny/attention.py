"""Training forward of V4 attention: window, compressed and indexed keys over whole rows."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny.config import TinyConfig
from tools.train_tiny.layers import rms, rotate
from tools.train_tiny.weights import Weights

QUERY_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Rows in a batch and positions in a row."""

    rows: int
    length: int


def attend(
    x: Tensor, w: Weights, cos: Tensor, sin: Tensor, shape: Shape, ratio: int, config: TinyConfig
) -> tuple[Tensor, Tensor]:
    """Attention output [N, D] of x [N, D], and the indexer's loss (zero without an indexer).

    Scores need no maximum subtracted: queries and keys are normalised, so exp cannot overflow.
    """
    rows, length = shape.rows, shape.length
    heads, dim, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
    latent = rms(F.linear(x, w["attn.wq_a.weight"]), eps, w["attn.q_norm.weight"])
    q = rms(F.linear(latent, w["attn.wq_b.weight"]).view(rows, length, heads, dim), eps)
    q = rotate(q, cos[:length, None], sin[:length, None]) * dim**-0.5
    kv = rms(F.linear(x, w["attn.wkv.weight"]), eps, w["attn.kv_norm.weight"])
    kv = rotate(kv.view(rows, length, dim), cos[:length], sin[:length])

    out, total = window_attention(q, kv, config.sliding_window)
    total = total + w["attn.attn_sink"].exp()
    index_loss = x.new_zeros(())
    if ratio and length >= ratio:
        entries = compress(x.view(rows, length, -1), w, "attn.compressor", ratio, cos, sin, eps)
        num = entries.shape[1]
        scores = torch.matmul(q.reshape(rows, length * heads, dim), entries.transpose(1, 2))
        visible = visible_entries(length, num, ratio)
        p = scores.view(rows, length, heads, num).exp() * visible.unsqueeze(1)
        if ratio == 4:
            index = index_scores(x, latent, w, cos, sin, shape, config)
            index_loss = divergence(p.detach(), index, visible)
            p = p * select(index.detach(), visible, config.index_topk).unsqueeze(2)
        total = total + p.sum(-1, dtype=torch.float32)
        out = out + torch.matmul(p.view(rows, length * heads, num), entries).view_as(q)
    out = rotate(out / total.unsqueeze(-1), cos[:length, None], -sin[:length, None])
    return project_output(out.reshape(rows * length, -1), w, config), index_loss


def project_output(out: Tensor, w: Weights, config: TinyConfig) -> Tensor:
    """Grouped low-rank output projection of [N, heads * dim]."""
    groups = config.o_groups
    wo_a = torch.unflatten(w["attn.wo_a.weight"], 0, (groups, -1))
    by_group = torch.unflatten(out, -1, (groups, -1)).transpose(0, 1)
    grouped = torch.bmm(by_group, wo_a.transpose(1, 2))
    return F.linear(grouped.transpose(0, 1).flatten(1), w["attn.wo_b.weight"])


def window_attention(q: Tensor, kv: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Unnormalised output [B, S, H, d] and weight sum [B, S, H] over the last `window` positions.

    Blocks of queries meet the keys of their block and of the window before it.
    """
    rows, length, heads, dim = q.shape
    num = length // QUERY_BLOCK
    span = window + QUERY_BLOCK
    padded = F.pad(kv, (0, 0, window, 0))
    keys = padded.unfold(1, span, QUERY_BLOCK).reshape(rows * num, dim, span)
    scores = torch.bmm(q.reshape(rows * num, QUERY_BLOCK * heads, dim), keys)
    query = torch.arange(QUERY_BLOCK).unsqueeze(1)
    key = torch.arange(span).unsqueeze(0)
    is_near = (key > query) & (key <= query + window)
    starts = torch.arange(num).view(num, 1, 1) * QUERY_BLOCK
    mask = is_near & (key + starts >= window)
    p = scores.view(rows, num, QUERY_BLOCK, heads, span).exp() * mask.unsqueeze(2)
    out = torch.bmm(p.view(rows * num, QUERY_BLOCK * heads, span), keys.transpose(1, 2))
    return out.view_as(q), p.sum(-1, dtype=torch.float32).view(rows, length, heads)


def visible_entries(length: int, num: int, ratio: int) -> Tensor:
    """[length, num]: entry w is visible to position t iff w < (t + 1) // ratio."""
    closed = (torch.arange(length).unsqueeze(1) + 1) // ratio
    return torch.arange(num).unsqueeze(0) < closed


def compress(
    x: Tensor, w: Weights, name: str, ratio: int, cos: Tensor, sin: Tensor, eps: float
) -> Tensor:
    """Entries [B, S // ratio, c] of x [B, S, D]; ratio 4 also reads the window before its own."""
    num = x.shape[1] // ratio
    x = x[:, : num * ratio]
    value = torch.unflatten(F.linear(x, w[f"{name}.wkv.weight"]), 1, (num, ratio))
    gate = torch.unflatten(F.linear(x, w[f"{name}.wgate.weight"]), 1, (num, ratio))
    gate = gate + w[f"{name}.ape"]
    if ratio == 4:
        old_value, value = value.chunk(2, -1)
        old_gate, gate = gate.chunk(2, -1)
        old_value = F.pad(old_value[:, :-1], (0, 0, 0, 0, 1, 0))
        old_gate = F.pad(old_gate[:, :-1], (0, 0, 0, 0, 1, 0), value=-1e30)
        value, gate = torch.cat([old_value, value], 2), torch.cat([old_gate, gate], 2)
    entry = rms((value * torch.softmax(gate, 2)).sum(2), eps, w[f"{name}.norm.weight"])
    positions = slice(0, num * ratio, ratio)
    return rotate(entry, cos[positions], sin[positions])


def index_scores(
    x: Tensor,
    latent: Tensor,
    w: Weights,
    cos: Tensor,
    sin: Tensor,
    shape: Shape,
    config: TinyConfig,
) -> Tensor:
    """Scores [B, S, S // 4] of the indexer, which learns from the attention and never steers it."""
    rows, length = shape.rows, shape.length
    heads, dim = config.index_n_heads, config.index_head_dim
    x, latent = x.detach(), latent.detach()
    name = "attn.indexer"
    keys = compress(
        x.view(rows, length, -1), w, f"{name}.compressor", 4, cos, sin, config.rms_norm_eps
    )
    q = F.linear(latent, w[f"{name}.wq_b.weight"]).view(rows, length, heads, dim)
    q = rotate(q, cos[:length, None], sin[:length, None]).reshape(rows, length * heads, dim)
    scores = torch.relu(torch.matmul(q, keys.transpose(1, 2))).view(rows, length, heads, -1)
    weights = F.linear(x, w[f"{name}.weights_proj.weight"]).view(rows, length, heads, 1)
    scale: float = (dim * heads) ** -0.5
    return (scores * weights).sum(2) * scale


def select(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Mask [B, S, T] of the visible entries with the largest scores."""
    if scores.shape[-1] <= top_k:
        return visible.expand_as(scores)
    chosen = scores.masked_fill(~visible, -torch.inf).topk(top_k, -1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True) & visible


def divergence(p: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """KL from the main attention over visible entries (mean of heads) to the indexer's softmax."""
    p = p.float()
    share = p / (p.sum(-1, keepdim=True) + 1e-30)
    wanted = share.mean(2)
    log_scores = torch.log_softmax(scores.float().masked_fill(~visible, -1e30), -1)
    terms = wanted * (torch.log(wanted + 1e-20) - log_scores.clamp(min=-100))
    return terms.sum() / (scores.shape[0] * scores.shape[1])
