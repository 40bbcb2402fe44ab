"""The compiled kernels equal the plain ones, which are the specification."""

from __future__ import annotations

import pytest
import torch

from common.model.kernels import select_kernels
from common.model.kernels.cpu import CpuKernels
from common.model.kernels.plain import PlainKernels

FAST, PLAIN = CpuKernels(), PlainKernels()
STREAMS = 4


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 32), (7, 33), (300, 16)])
@pytest.mark.parametrize("spread", [1e-4, 1.0, 1e3])
def test_rms_norm(shape: tuple[int, int], spread: float) -> None:
    x, weight = spread * normal(*shape), normal(shape[1], seed=1)
    torch.testing.assert_close(
        FAST.rms_norm(x, weight, 1e-6), PLAIN.rms_norm(x, weight, 1e-6), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
def test_rotation(heads: int, inverse: bool) -> None:
    x = normal(9, heads, 24)
    rotations = torch.polar(torch.ones(9, 4), normal(9, 4, seed=1))
    fast = FAST.rotate(x, rotations, inverse=inverse)
    torch.testing.assert_close(fast, PLAIN.rotate(x, rotations, inverse=inverse))
    torch.testing.assert_close(fast[..., :16], x[..., :16], rtol=0, atol=0)


@pytest.mark.parametrize("num_rows", [1, 2, 200])
@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0])
def test_reading_and_writing_streams(num_rows: int, spread: float) -> None:
    h = normal(num_rows, STREAMS, 40)
    size = STREAMS * (2 + STREAMS)
    arguments = (
        h,
        spread * normal(num_rows, size, seed=1),
        normal(size, seed=2),
        normal(3, seed=3),
    )
    fast, plain = (
        kernels.read_streams(*arguments, iterations=20, hc_eps=1e-6, norm_eps=1e-6)
        for kernels in (FAST, PLAIN)
    )
    for ours, expected in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    y = normal(num_rows, 40, seed=4)
    torch.testing.assert_close(
        FAST.write_streams(h, plain, y), PLAIN.write_streams(h, plain, y), atol=1e-5, rtol=1e-5
    )


def test_few_experts() -> None:
    x, w13, w2 = normal(6, 20), normal(5, 16, 20, seed=1), normal(5, 20, 8, seed=2)
    ids = torch.tensor([[0, 4], [4, 0], [1, 2], [2, 3], [3, 1], [0, 1]])
    weights = normal(6, 2, seed=3).abs()
    torch.testing.assert_close(
        FAST.few_experts(x, ids, weights, w13, w2, 1.0),
        PLAIN.few_experts(x, ids, weights, w13, w2, 1.0),
        atol=1e-4,
        rtol=1e-4,
    )


def test_a_rows_result_does_not_depend_on_its_neighbours() -> None:
    h = normal(50, STREAMS, 40)
    size = STREAMS * (2 + STREAMS)
    mixes, base, scale = normal(50, size, seed=1), normal(size, seed=2), normal(3, seed=3)

    def read(rows: slice) -> tuple[torch.Tensor, ...]:
        return FAST.read_streams(
            h[rows], mixes[rows], base, scale, iterations=20, hc_eps=1e-6, norm_eps=1e-6
        )

    for alone, together in zip(read(slice(7, 8)), read(slice(0, 50)), strict=True):
        assert torch.equal(alone[0], together[7])


def test_compiled_kernels_are_chosen_where_they_run() -> None:
    cpu = torch.device("cpu")
    assert isinstance(select_kernels(cpu, torch.float32), CpuKernels)
    assert isinstance(select_kernels(cpu, torch.bfloat16), PlainKernels)
