"""The kernels for CUDA devices: the residual streams of a row in one launch, where plain torch takes a hundred.

Forty normalisations of a 4 x 4 matrix cost more in launches than the layer around them in arithmetic.
"""

from __future__ import annotations

import torch

from common.model.kernels.interface import StreamMix
from common.model.kernels.plain import PlainKernels
from common.model.kernels.triton_streams import read_streams


class CudaKernels(PlainKernels):
    """Plain torch for the rest, whose norms and products are fused there already."""

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
        if streams & (streams - 1):
            # Triton's blocks are powers of two.
            return super().read_streams(
                h,
                mixes,
                base,
                scale,
                iterations=iterations,
                hc_eps=hc_eps,
                norm_eps=norm_eps,
            )
        mix = StreamMix(
            h.new_empty(rows, hidden),
            h.new_empty(rows, streams, dtype=torch.float32),
            h.new_empty(rows, streams, streams, dtype=torch.float32),
        )
        if rows:
            read_streams[(rows,)](
                h.contiguous(),
                mixes.contiguous(),
                base,
                scale,
                mix.x,
                mix.post,
                mix.comb,
                hidden,
                iterations,
                hc_eps,
                norm_eps,
                STREAMS=streams,
                BLOCK=1024,
            )
        return mix
