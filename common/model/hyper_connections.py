"""Manifold-constrained hyper-connections: several residual streams mixed by doubly stochastic matrices, in float32.

Source: DeepSeek-V4, hyper-connections with Sinkhorn projection. Letters: N rows, S streams, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.model.config import ModelConfig
from common.model.kernels import Kernels, StreamMix
from common.model.weights import Weights


class HyperConnection:
    """The connection around one sublayer; tensors `hc_{name}_{fn,base,scale}`."""

    def __init__(self, config: ModelConfig, weights: Weights, name: str, kernels: Kernels) -> None:
        streams = config.hc_mult
        num_mixes = streams * (2 + streams)
        self._config = config
        self._kernels = kernels
        self.fn = weights.floats(f"hc_{name}_fn", num_mixes, streams * config.hidden_size)
        self.base = weights.floats(f"hc_{name}_base", num_mixes)
        self.scale = weights.floats(f"hc_{name}_scale", 3)

    def read(self, h: torch.Tensor) -> StreamMix:
        """Derive the mix from the streams `h [N, S, D]` and collapse them to the sublayer's input."""
        return self._kernels.read_streams(
            h,
            F.linear(h.flatten(1).float(), self.fn),
            self.base,
            self.scale,
            iterations=self._config.hc_sinkhorn_iters,
            hc_eps=self._config.hc_eps,
            norm_eps=self._config.rms_norm_eps,
        )

    def write(self, h: torch.Tensor, mix: StreamMix, y: torch.Tensor) -> torch.Tensor:
        """Streams `[N, S, D]` after the sublayer gave `y [N, D]`."""
        return self._kernels.write_streams(h, mix, y)


class HyperHead:
    """Collapses the streams behind the last layer; tensors `hc_head_{fn,base,scale}`."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self.fn = weights.floats("hc_head_fn", config.hc_mult, config.hc_mult * config.hidden_size)
        self.base = weights.floats("hc_head_base", config.hc_mult)
        self.scale = weights.floats("hc_head_scale", 1)

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """`[N, S, D]` to `[N, D]`."""
        wide = h.float()
        norm = wide.square().mean((1, 2)).add_(self._config.rms_norm_eps).rsqrt_().unsqueeze(-1)
        mixes = F.linear(wide.flatten(1), self.fn) * norm
        pre = torch.sigmoid(mixes * self.scale + self.base) + self._config.hc_eps
        return torch.bmm(pre.unsqueeze(1), wide).squeeze(1).to(h.dtype)
