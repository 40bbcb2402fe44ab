"""Manifold-constrained hyper-connections: several residual streams mixed by doubly stochastic matrices, in float32.

Source: DeepSeek-V4, hyper-connections with Sinkhorn projection. Letters: N rows, S streams, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from common.model.config import ModelConfig
from common.model.kernels import Kernels
from common.model.weights import Weights


class StreamMix(NamedTuple):
    """How one sublayer reads and writes the streams."""

    x: torch.Tensor
    """Input of the sublayer, `[N, D]`."""
    post: torch.Tensor
    """Weight of its output in each stream, `[N, S]`."""
    comb: torch.Tensor
    """What each stream (first index) gives to each stream (second index), `[N, S, S]`."""


class HyperConnection:
    """The connection around one sublayer; tensors `hc_{name}_{fn,base,scale}`."""

    def __init__(self, config: ModelConfig, weights: Weights, name: str, kernels: Kernels) -> None:
        self._streams = config.hc_mult
        self._iterations = config.hc_sinkhorn_iters
        self._hc_eps = config.hc_eps
        self._norm_eps = config.rms_norm_eps
        self._kernels = kernels
        num_mixes = self._streams * (2 + self._streams)
        self.fn = weights.floats(f"hc_{name}_fn", num_mixes, self._streams * config.hidden_size)
        self.base = weights.floats(f"hc_{name}_base", num_mixes)
        self.scale = weights.floats(f"hc_{name}_scale", 3)

    def read(self, h: torch.Tensor) -> StreamMix:
        """Derive the mix from the streams `h [N, S, D]` and collapse them to the sublayer's input."""
        flat = h.flatten(1).float()
        pre, post, comb = self._kernels.stream_mix(
            flat @ self.fn.T,
            flat.square().mean(-1).add_(self._norm_eps).rsqrt_(),
            self.base,
            self.scale,
            self._streams,
            self._iterations,
            self._hc_eps,
        )
        x = torch.bmm(pre.unsqueeze(1), flat.view(-1, self._streams, h.shape[-1])).squeeze(1)
        return StreamMix(x.to(h.dtype), post, comb)

    def write(self, h: torch.Tensor, mix: StreamMix, y: torch.Tensor) -> torch.Tensor:
        """Streams after the sublayer gave `y [N, D]`: `post[k] * y + sum over j of comb[j, k] * h[j]`."""
        kept = torch.bmm(mix.comb.transpose(1, 2), h.float())
        return kept.addcmul_(mix.post.unsqueeze(-1), y.float().unsqueeze(1)).to(h.dtype)


class HyperHead:
    """Collapses the streams behind the last layer; tensors `hc_head_{fn,base,scale}`."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._streams = config.hc_mult
        self._hc_eps = config.hc_eps
        self._norm_eps = config.rms_norm_eps
        self.fn = weights.floats("hc_head_fn", self._streams, self._streams * config.hidden_size)
        self.base = weights.floats("hc_head_base", self._streams)
        self.scale = weights.floats("hc_head_scale", 1)

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """`[N, S, D]` to `[N, D]`."""
        flat = h.flatten(1).float()
        norm = flat.square().mean(-1, keepdim=True).add_(self._norm_eps).rsqrt_()
        pre = torch.sigmoid((flat @ self.fn.T) * norm * self.scale + self.base) + self._hc_eps
        return (
            torch.bmm(pre.unsqueeze(1), flat.view(-1, self._streams, h.shape[-1]))
            .squeeze(1)
            .to(h.dtype)
        )
