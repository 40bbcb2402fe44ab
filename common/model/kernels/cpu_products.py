"""Products of 8-bit matrices on CPUs, by the instructions that multiply bytes: exact, and faster than floats."""

from __future__ import annotations

import functools

import torch

from common.model.kernels.eight_bits import EightBitProducts, PlainProducts


class CpuProducts(PlainProducts):
    """FP8, for which CPUs have no instructions, goes by values."""

    def int8_sums(self, row_codes: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(row_codes, codes.T)


@functools.cache
def cpu_products() -> EightBitProducts:
    """Plain ones where this CPU's instructions do not hold every sum: some add pairs in 16 bits and saturate."""
    extremes = torch.full((16, 64), -128, dtype=torch.int8)
    fast, plain = CpuProducts(), PlainProducts()
    for rows in (extremes, -(extremes + 1)):
        expected = plain.int8_sums(rows, extremes).to(torch.int32)
        if not torch.equal(fast.int8_sums(rows, extremes), expected):
            return plain
    return fast
