"""The loops behind the CPU kernels, in the subset of Python that numba compiles. Arrays are float32 and contiguous.

`reassoc` lets the compiler sum in vector lanes; the order is fixed at compile time, so results are reproducible.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

compiled = numba.njit(
    cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
)


@compiled
def rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    rows, width = x.shape
    for n in range(rows):
        total = np.float32(0.0)
        for i in range(width):
            total += x[n, i] * x[n, i]
        factor = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(width) + eps))
        for i in range(width):
            out[n, i] = x[n, i] * factor * weight[i]


@compiled
def rotate(x: Any, rotations: Any, sign: Any, out: Any) -> None:
    rows, heads, width = x.shape
    pairs = rotations.shape[1]
    first = width - 2 * pairs
    for n in range(rows):
        for h in range(heads):
            for i in range(first):
                out[n, h, i] = x[n, h, i]
            for p in range(pairs):
                cosine, sine = rotations[n, p].real, sign * rotations[n, p].imag
                even, odd = x[n, h, first + 2 * p], x[n, h, first + 2 * p + 1]
                out[n, h, first + 2 * p] = even * cosine - odd * sine
                out[n, h, first + 2 * p + 1] = even * sine + odd * cosine


@compiled
def sigmoid(x: Any) -> Any:
    return np.float32(1.0) / (np.float32(1.0) + np.float32(math.exp(-x)))


@compiled
def normalise_columns(c: Any, eps: Any) -> None:
    streams = c.shape[0]
    for j in range(streams):
        total = np.float32(0.0)
        for i in range(streams):
            total += c[i, j]
        for i in range(streams):
            c[i, j] /= total + eps


@compiled
def normalise_rows(c: Any, eps: Any) -> None:
    streams = c.shape[0]
    for i in range(streams):
        total = np.float32(0.0)
        for j in range(streams):
            total += c[i, j]
        for j in range(streams):
            c[i, j] /= total + eps


@compiled
def sinkhorn(c: Any, iterations: Any, eps: Any) -> None:
    """Softmax over rows, then alternate normalisations, columns first and last."""
    streams = c.shape[0]
    for i in range(streams):
        largest = c[i, 0]
        for j in range(1, streams):
            largest = max(largest, c[i, j])
        total = np.float32(0.0)
        for j in range(streams):
            c[i, j] = np.float32(math.exp(c[i, j] - largest))
            total += c[i, j]
        for j in range(streams):
            c[i, j] = c[i, j] / total + eps
    normalise_columns(c, eps)
    for _ in range(iterations - 1):
        normalise_rows(c, eps)
        normalise_columns(c, eps)


@compiled
def read_streams(
    h: Any,
    mixes: Any,
    base: Any,
    scale: Any,
    iterations: Any,
    hc_eps: Any,
    norm_eps: Any,
    x: Any,
    post: Any,
    comb: Any,
) -> None:
    rows, streams, hidden = h.shape
    for n in range(rows):
        total = np.float32(0.0)
        for s in range(streams):
            for i in range(hidden):
                total += h[n, s, i] * h[n, s, i]
        norm = np.float32(1.0) / np.float32(
            math.sqrt(total / np.float32(streams * hidden) + norm_eps)
        )
        for i in range(hidden):
            x[n, i] = np.float32(0.0)
        for s in range(streams):
            t = streams + s
            pre = sigmoid(mixes[n, s] * norm * scale[0] + base[s]) + hc_eps
            post[n, s] = np.float32(2.0) * sigmoid(mixes[n, t] * norm * scale[1] + base[t])
            for i in range(hidden):
                x[n, i] += pre * h[n, s, i]
        for i in range(streams):
            for j in range(streams):
                t = 2 * streams + i * streams + j
                comb[n, i, j] = mixes[n, t] * norm * scale[2] + base[t]
        sinkhorn(comb[n], iterations, hc_eps)


@compiled
def write_streams(h: Any, post: Any, comb: Any, y: Any, out: Any) -> None:
    rows, streams, hidden = h.shape
    for n in range(rows):
        for k in range(streams):
            for i in range(hidden):
                out[n, k, i] = post[n, k] * y[n, i]
            for j in range(streams):
                weight = comb[n, j, k]
                for i in range(hidden):
                    out[n, k, i] += weight * h[n, j, i]


@compiled
def few_experts(
    x: Any, expert_ids: Any, expert_weights: Any, w13: Any, w2: Any, limit: Any, out: Any
) -> None:
    rows, top_k = expert_ids.shape
    hidden, width = w2.shape[1], w2.shape[2]
    y = np.empty(width, np.float32)
    for n in range(rows):
        for k in range(top_k):
            e = expert_ids[n, k]
            for i in range(width):
                gate = np.float32(0.0)
                up = np.float32(0.0)
                for d in range(hidden):
                    gate += w13[e, i, d] * x[n, d]
                    up += w13[e, width + i, d] * x[n, d]
                gate = min(gate, limit)
                up = max(min(up, limit), -limit)
                y[i] = gate * sigmoid(gate) * up * expert_weights[n, k]
            for d in range(hidden):
                total = np.float32(0.0)
                for i in range(width):
                    total += w2[e, d, i] * y[i]
                out[n, d] += total
