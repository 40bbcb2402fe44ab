"""The kernels in plain torch: slow, short, and what every fast version is tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.model.kernels.interface import StreamMix


class PlainKernels:
    """Runs on any device and dtype."""

    few_pairs = 0

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotate(
        self, x: torch.Tensor, rotations: torch.Tensor, *, inverse: bool = False
    ) -> torch.Tensor:
        rope_dim = 2 * rotations.shape[-1]
        turn = (rotations.conj() if inverse else rotations).unsqueeze(1)
        pairs = torch.view_as_complex(x[..., -rope_dim:].float().reshape(*x.shape[:-1], -1, 2))
        rotated = torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
        return torch.cat((x[..., :-rope_dim], rotated), dim=-1)

    def read_streams(
        self,
        h: torch.Tensor,
        mixes: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        *,
        iterations: int,
        hc_eps: float,
        norm_eps: float,
    ) -> StreamMix:
        streams = h.shape[1]
        wide = h.float()
        m = mixes * (wide.square().mean((1, 2)) + norm_eps).rsqrt().unsqueeze(-1)
        m_pre, m_post, m_comb = m[:, :streams], m[:, streams : 2 * streams], m[:, 2 * streams :]
        b_pre, b_post, b_comb = base[:streams], base[streams : 2 * streams], base[2 * streams :]
        pre = torch.sigmoid(m_pre * scale[0] + b_pre) + hc_eps
        post = 2 * torch.sigmoid(m_post * scale[1] + b_post)
        comb = (m_comb * scale[2] + b_comb).view(-1, streams, streams).softmax(-1) + hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
        x = torch.bmm(pre.unsqueeze(1), wide).squeeze(1)
        return StreamMix(x.to(h.dtype), post, comb)

    def write_streams(self, h: torch.Tensor, mix: StreamMix, y: torch.Tensor) -> torch.Tensor:
        kept = torch.bmm(mix.comb.transpose(1, 2), h.float())
        return (kept + mix.post.unsqueeze(-1) * y.float().unsqueeze(1)).to(h.dtype)

    def few_experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        limit: float,
    ) -> torch.Tensor:
        pair = torch.einsum("nd,nkid->nki", x, w13[expert_ids])
        gate, up = pair.chunk(2, dim=-1)
        y = (
            F.silu(gate.clamp(max=limit))
            * up.clamp(-limit, limit)
            * expert_weights.to(x.dtype).unsqueeze(-1)
        )
        return torch.einsum("nki,nkdi->nd", y, w2[expert_ids])
