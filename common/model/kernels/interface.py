"""The interface of device-specific fast paths. The plain torch version is the specification.

Letters: N rows, S streams, D hidden size, H heads, E experts, k experts per token, I expert width.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class StreamMix(NamedTuple):
    """How one sublayer reads and writes the residual streams."""

    x: torch.Tensor
    """Input of the sublayer, `[N, D]`."""
    post: torch.Tensor
    """Weight of its output in each stream, `[N, S]` float32."""
    comb: torch.Tensor
    """What each stream (first index) gives to each stream (second index), `[N, S, S]` float32."""


class Kernels(Protocol):
    """Functions that spend their time in launching tiny operations, or in touching weights that a row does not need."""

    few_pairs: int
    """Row-expert pairs up to which `few_experts` is the better choice; 0 for never."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dim of `x [N, W]`."""
        ...

    def rotate(
        self, x: torch.Tensor, rotations: torch.Tensor, *, inverse: bool = False
    ) -> torch.Tensor:
        """Rotate interleaved pairs of the trailing dims of `x [N, H, W]` by `rotations [N, rope_dim / 2]` complex."""
        ...

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
        """Turn streams `h [N, S, D]` and their raw mixes `[N, S * (2 + S)]` into a sublayer's mix.

        Raw mixes are divided by the root mean square of all of a row's streams; comb is made doubly stochastic by
        `iterations` Sinkhorn steps.
        """
        ...

    def write_streams(self, h: torch.Tensor, mix: StreamMix, y: torch.Tensor) -> torch.Tensor:
        """`out[k] = post[k] * y + sum over j of comb[j, k] * h[j]` for `y [N, D]`."""
        ...

    def few_experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        limit: float,
    ) -> torch.Tensor:
        """Weighted sum of `[N, k]` chosen experts for few rows `x [N, D]`; `w13 [E, 2 * I, D]`, `w2 [E, D, I]`."""
        ...
