"""The kernels for CPUs in float32, compiled by numba: one call instead of many launches.

Every row is computed by itself and in one order, so a row's result does not depend on its neighbours.
"""

from __future__ import annotations

import numpy as np
import torch

from common.model.kernels import cpu_loops as loops
from common.model.kernels.interface import StreamMix


class CpuKernels:
    """Takes contiguous float32 CPU tensors. The first call compiles, or loads what an earlier process compiled."""

    # Beyond this the matrix library wins by using each weight for many rows (measured at 16 experts, two cores).
    few_pairs = 512

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        loops.rms_norm(x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
        return out

    def rotate(
        self, x: torch.Tensor, rotations: torch.Tensor, *, inverse: bool = False
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        loops.rotate(x.numpy(), rotations.numpy(), np.float32(-1 if inverse else 1), out.numpy())
        return out

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
        rows, streams, hidden = h.shape
        mix = StreamMix(
            torch.empty(rows, hidden),
            torch.empty(rows, streams),
            torch.empty(rows, streams, streams),
        )
        loops.read_streams(
            h.numpy(),
            mixes.numpy(),
            base.numpy(),
            scale.numpy(),
            iterations,
            np.float32(hc_eps),
            np.float32(norm_eps),
            mix.x.numpy(),
            mix.post.numpy(),
            mix.comb.numpy(),
        )
        return mix

    def write_streams(self, h: torch.Tensor, mix: StreamMix, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(h)
        loops.write_streams(h.numpy(), mix.post.numpy(), mix.comb.numpy(), y.numpy(), out.numpy())
        return out

    def few_experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        limit: float,
    ) -> torch.Tensor:
        out = torch.zeros_like(x)
        loops.few_experts(
            x.numpy(),
            expert_ids.numpy(),
            expert_weights.numpy(),
            w13.numpy(),
            w2.numpy(),
            np.float32(limit),
            out.numpy(),
        )
        return out
