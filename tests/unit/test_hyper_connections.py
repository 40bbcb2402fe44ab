"""Hyper-connections: with either kernels, reading and writing the streams follow the formulas."""

from __future__ import annotations

import pytest
import torch

from common.model.config import ModelConfig
from common.model.hyper_connections import HyperConnection, HyperHead
from common.model.kernels.cpu import CpuKernels
from common.model.kernels.interface import Kernels
from common.model.kernels.plain import PlainKernels
from common.model.weights import Weights
from tests.support.tiny_checkpoint import config_json, random_tensors

CONFIG = ModelConfig.from_json(config_json())
TENSORS = random_tensors(CONFIG, seed=6)
WEIGHTS = Weights(TENSORS, dtype=torch.float32, device=torch.device("cpu"))
STREAMS, EPS = CONFIG.hc_mult, CONFIG.hc_eps


def streams(num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, STREAMS, CONFIG.hidden_size, generator=generator)


def slow_mix(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row in double precision, loop by loop: pre, post and the doubly stochastic matrix."""
    fn, base, scale = (
        TENSORS[f"layers.0.hc_attn_{part}"].double() for part in ("fn", "base", "scale")
    )
    flat = h.flatten().double()
    m = (fn @ flat) / (flat.square().mean() + CONFIG.rms_norm_eps).sqrt()
    pre = torch.sigmoid(m[:4] * scale[0] + base[:4]) + EPS
    post = 2 * torch.sigmoid(m[4:8] * scale[1] + base[4:8])
    c = (m[8:24] * scale[2] + base[8:24]).view(4, 4)
    c = torch.stack([torch.exp(row) / torch.exp(row).sum() for row in c]) + EPS
    for turn in range(CONFIG.hc_sinkhorn_iters):
        if turn:
            c = torch.stack([row / (row.sum() + EPS) for row in c])
        c = torch.stack([column / (column.sum() + EPS) for column in c.T]).T
    return pre, post, c


@pytest.mark.parametrize("kernels", [PlainKernels(), CpuKernels()], ids=["plain", "cpu"])
def test_reading_and_writing_follow_the_formulas(kernels: Kernels) -> None:
    connection = HyperConnection(CONFIG, WEIGHTS.under("layers.0"), "attn", kernels)
    h = streams(5)
    y = torch.randn(5, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    mix = connection.read(h)
    written = connection.write(h, mix, y)
    for n in range(5):
        pre, post, comb = slow_mix(h[n])
        x = sum(pre[j] * h[n, j] for j in range(STREAMS))
        torch.testing.assert_close(mix.x[n], torch.as_tensor(x).float(), atol=1e-5, rtol=1e-5)
        for k in range(STREAMS):
            out = post[k] * y[n] + sum(comb[j, k] * h[n, j] for j in range(STREAMS))
            torch.testing.assert_close(written[n, k], out.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", [PlainKernels(), CpuKernels()], ids=["plain", "cpu"])
def test_the_combination_is_doubly_stochastic(kernels: Kernels) -> None:
    mix = HyperConnection(CONFIG, WEIGHTS.under("layers.0"), "ffn", kernels).read(streams(64))
    ones = torch.ones(64, STREAMS)
    assert (mix.comb > 0).all()
    torch.testing.assert_close(mix.comb.sum(-2), ones, atol=1e-4, rtol=0)
    torch.testing.assert_close(mix.comb.sum(-1), ones, atol=2e-2, rtol=0)


def test_the_head_is_a_weighted_sum_of_the_streams() -> None:
    h = streams(3)
    out = HyperHead(CONFIG, WEIGHTS)(h)
    for n in range(3):
        flat = h[n].flatten().double()
        m = TENSORS["hc_head_fn"].double() @ flat / (flat.square().mean() + 1e-6).sqrt()
        weight = torch.sigmoid(m * TENSORS["hc_head_scale"] + TENSORS["hc_head_base"]) + EPS
        expected = (weight[:, None] * h[n].double()).sum(0)
        torch.testing.assert_close(out[n], expected.float(), atol=1e-5, rtol=1e-5)
