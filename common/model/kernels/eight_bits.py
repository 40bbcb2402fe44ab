"""Products of 8-bit matrices with 8-bit activations. The plain torch version is the specification.

Activations are quantised row by row while a product is computed, so that a row's result does not depend on its
neighbours. Letters: N rows, K columns, M rows of the matrix.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

INT8_LARGEST = 127.0
SMALLEST_INT8_AMAX = 1e-12
FP8_BLOCK = 128
"""Columns of a row, and rows and columns of a matrix, that share a scale."""
FP8_LARGEST = 448.0
SMALLEST_FP8_AMAX = 1e-4


class EightBitProducts(Protocol):
    """What a device does with matrices that stay in eight bits.

    Results are `[N, M]` in the type of `x [N, K]`, which has at least a row.
    """

    def int8_linear(
        self, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """`codes [M, K]` int8 with a float32 `scale [M]`; rows of `x` are quantised by `int8_rows`."""
        ...

    def fp8_linear(
        self, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor | None:
        """`codes [M, K]` e4m3 with a float32 `scale` by block; rows of `x` are quantised by `fp8_rows`.

        None where the device has no product for it: then that of `fp8_rounded(x)` with the matrix's values is the same.
        """
        ...


class PlainProducts:
    """Runs on any device that has float64, which holds every sum of products of bytes exactly; FP8 goes by values."""

    def int8_linear(
        self, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        row_codes, row_scale = int8_rows(x)
        sums = self.int8_sums(row_codes, codes).float()
        return (sums * row_scale.unsqueeze(-1) * scale).to(x.dtype)

    def int8_sums(self, row_codes: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """`[N, K]` times `[M, K]` transposed, exactly."""
        return row_codes.double() @ codes.double().T

    def fp8_linear(
        self, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor | None:
        return None


def int8_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[N, K]` int8 and float32 scales `[N]`, symmetric."""
    values = values.float()
    scale = values.abs().amax(-1).clamp(min=SMALLEST_INT8_AMAX) / INT8_LARGEST
    codes = (values / scale.unsqueeze(-1)).round_().clamp_(-128, 127)
    return codes.to(torch.int8).contiguous(), scale


def fp8_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[N, K]` e4m3 and float32 scales `[N, ceil(K / 128)]`, which are powers of two, by 128 columns of a row."""
    rows, columns = values.shape
    padded = F.pad(values.float(), (0, -columns % FP8_BLOCK))
    groups = padded.reshape(rows, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    largest = groups.abs().amax(-1).clamp(min=SMALLEST_FP8_AMAX) / FP8_LARGEST
    mantissa, exponent = torch.frexp(largest)  # the mantissa is in [0.5, 1)
    scale = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).to(exponent.dtype))
    codes = (groups / scale.unsqueeze(-1)).flatten(1)[:, :columns]
    return codes.contiguous().to(torch.float8_e4m3fn), scale


def fp8_rounded(values: torch.Tensor) -> torch.Tensor:
    """What `fp8_rows` keeps of values, in their type."""
    codes, scale = fp8_rows(values)
    by_column = scale.repeat_interleave(FP8_BLOCK, dim=1)[:, : values.shape[1]]
    return (codes.float() * by_column).to(values.dtype)
