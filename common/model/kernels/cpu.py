"""The kernels for CPUs, compiled by numba: one call instead of a hundred launches a sublayer."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch

from common.model.kernels.interface import Mixes


class CpuKernels:
    """Runs on float32 CPU tensors. The first call compiles, or loads what an earlier process compiled."""

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
        rows = mixes.shape[0]
        pre = torch.empty(rows, streams)
        post = torch.empty(rows, streams)
        comb = torch.empty(rows, streams, streams)
        _stream_mix(
            mixes.numpy(),
            norm.numpy(),
            base.numpy(),
            scale.numpy(),
            iterations,
            np.float32(eps),
            pre.numpy(),
            post.numpy(),
            comb.numpy(),
        )
        return pre, post, comb


@numba.njit(cache=True, fastmath=False)
def _sigmoid(x: Any) -> Any:
    return np.float32(1.0) / (np.float32(1.0) + np.float32(math.exp(-x)))


@numba.njit(cache=True, fastmath=False)
def _stream_mix(
    mixes: Any,
    norm: Any,
    base: Any,
    scale: Any,
    iterations: Any,
    eps: Any,
    pre: Any,
    post: Any,
    comb: Any,
) -> None:
    rows, streams = pre.shape
    for n in range(rows):
        for s in range(streams):
            pre[n, s] = _sigmoid(mixes[n, s] * norm[n] * scale[0] + base[s]) + eps
            t = streams + s
            post[n, s] = np.float32(2.0) * _sigmoid(mixes[n, t] * norm[n] * scale[1] + base[t])
        c = comb[n]
        for i in range(streams):
            largest = np.float32(-np.inf)
            for j in range(streams):
                t = 2 * streams + i * streams + j
                c[i, j] = mixes[n, t] * norm[n] * scale[2] + base[t]
                largest = max(largest, c[i, j])
            total = np.float32(0.0)
            for j in range(streams):
                c[i, j] = np.float32(math.exp(c[i, j] - largest))
                total += c[i, j]
            for j in range(streams):
                c[i, j] = c[i, j] / total + eps
        _normalise_columns(c, eps)
        for _ in range(iterations - 1):
            for i in range(streams):
                total = np.float32(0.0)
                for j in range(streams):
                    total += c[i, j]
                for j in range(streams):
                    c[i, j] /= total + eps
            _normalise_columns(c, eps)


@numba.njit(cache=True, fastmath=False)
def _normalise_columns(c: Any, eps: Any) -> None:
    streams = c.shape[0]
    for j in range(streams):
        total = np.float32(0.0)
        for i in range(streams):
            total += c[i, j]
        for i in range(streams):
            c[i, j] /= total + eps
