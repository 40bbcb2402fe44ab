"""Reading of residual streams as a Triton kernel; a program is one row. See `PlainKernels.read_streams`, the specification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

compiled: Callable[[Callable[..., None]], Any] = triton.jit


@compiled
def read_streams(
    h: Any,
    mixes: Any,
    base: Any,
    scale: Any,
    x: Any,
    post: Any,
    comb: Any,
    hidden: Any,
    iterations: Any,
    hc_eps: Any,
    norm_eps: Any,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """`h [N, S, D]` of any float type; everything but `x` is float32. All of them are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    h += row * STREAMS * hidden
    mixes += row * STREAMS * (2 + STREAMS)
    size = STREAMS * hidden
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(h + at, mask=at < size, other=0.0).to(tl.float32)
        squares += value * value
    norm = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / size + norm_eps)

    s = tl.arange(0, STREAMS)
    pre = tl.load(mixes + s) * norm * tl.load(scale) + tl.load(base + s)
    pre = tl.sigmoid(pre) + hc_eps
    t = STREAMS + s
    out = tl.load(mixes + t) * norm * tl.load(scale + 1) + tl.load(base + t)
    tl.store(post + row * STREAMS + s, 2.0 * tl.sigmoid(out))

    pair = s[:, None] * STREAMS + s[None, :]
    u = 2 * STREAMS + pair
    c = tl.load(mixes + u) * norm * tl.load(scale + 2) + tl.load(base + u)
    c = tl.exp(c - tl.max(c, axis=1)[:, None])
    c = c / tl.sum(c, axis=1)[:, None] + hc_eps
    c = c / (tl.sum(c, axis=0)[None, :] + hc_eps)
    for _ in range(iterations - 1):
        c = c / (tl.sum(c, axis=1)[:, None] + hc_eps)
        c = c / (tl.sum(c, axis=0)[None, :] + hc_eps)
    tl.store(comb + row * STREAMS * STREAMS + pair, c)

    for begin in range(0, hidden, BLOCK):
        d = begin + tl.arange(0, BLOCK)
        is_there = d < hidden
        value = tl.load(h + s[:, None] * hidden + d[None, :], mask=is_there[None, :], other=0.0).to(
            tl.float32
        )
        tl.store(x + row * hidden + d, tl.sum(pre[:, None] * value, axis=0), mask=is_there)
