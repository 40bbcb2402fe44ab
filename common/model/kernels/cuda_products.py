"""Products of 8-bit matrices on CUDA devices, by the tensor cores' own types."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.model.kernels.eight_bits import FP8_BLOCK, EightBitProducts, PlainProducts, fp8_rows

MIN_INT8_ROWS = 32
"""torch's product of bytes takes no fewer than 17."""
INT8_MULTIPLE = 8
FP8_ROWS = 16
"""Rows are padded to a multiple of it, with which their scales lie aligned."""
FP8_COLUMNS = 4 * FP8_BLOCK
"""With a multiple of it, scales need no padding: the library wants rows of four."""
FP8_CAPABILITY, FP8_CUDA = (9, 0), (12, 9)
"""Only these devices have products with a scale per block, from this version of the library on."""


class CudaProducts(PlainProducts):
    """Plain torch, or values, for shapes that the library does not take."""

    def __init__(self, *, has_fp8_blocks: bool) -> None:
        self._has_fp8_blocks = has_fp8_blocks

    def int8_sums(self, row_codes: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        num_rows = row_codes.shape[0]
        if codes.shape[0] % INT8_MULTIPLE or codes.shape[1] % INT8_MULTIPLE:
            return super().int8_sums(row_codes, codes)
        padded = F.pad(row_codes, (0, 0, 0, max(0, MIN_INT8_ROWS - num_rows)))
        return torch._int_mm(padded, codes.T)[:num_rows]

    def fp8_linear(
        self, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor | None:
        rows, columns = codes.shape
        if not self._has_fp8_blocks or rows % FP8_BLOCK or columns % FP8_COLUMNS:
            return None
        num_rows = x.shape[0]
        row_codes, row_scale = fp8_rows(F.pad(x, (0, 0, 0, -num_rows % FP8_ROWS)))
        # Scales of rows must lie column by column; those of the matrix are turned round with it.
        row_scale = row_scale.T.contiguous().T
        product = torch._scaled_mm(row_codes, codes.T, row_scale, scale.T, out_dtype=x.dtype)
        return product[:num_rows]


def cuda_products(device: torch.device) -> EightBitProducts:
    """By what the device and torch's CUDA can do."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    is_able = torch.cuda.get_device_capability(device) == FP8_CAPABILITY
    return CudaProducts(has_fp8_blocks=is_able and version >= FP8_CUDA)
