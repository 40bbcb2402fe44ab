"""The kernels in plain torch: slow, short, and what every fast version is tested against."""

from __future__ import annotations

import torch

from common.model.kernels.interface import Mixes


class PlainKernels:
    """Runs on any device."""

    def stream_mix(
        self,
        mixes: torch.Tensor,
        norm: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        streams: int,
        iterations: int,
        eps: float,
    ) -> Mixes:
        m = mixes * norm.unsqueeze(-1)
        pre = torch.sigmoid(m[:, :streams] * scale[0] + base[:streams]) + eps
        post = 2 * torch.sigmoid(
            m[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams]
        )
        comb = (m[:, 2 * streams :] * scale[2] + base[2 * streams :]).view(-1, streams, streams)
        comb = comb.softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return pre, post, comb
