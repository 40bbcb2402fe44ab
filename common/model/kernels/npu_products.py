"""Products of 8-bit matrices on Ascend devices: fused operations of torch-npu."""

from __future__ import annotations

from typing import Protocol, cast

import torch

from common.model.kernels.eight_bits import PlainProducts


class QuantisedOperations(Protocol):
    """What is used of the package `torch_npu`."""

    def npu_dynamic_quant(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and a float32 scale per row of BF16 or FP16."""
        ...

    def npu_quant_matmul(
        self,
        x1: torch.Tensor,
        x2: torch.Tensor,
        scale: torch.Tensor,
        *,
        pertoken_scale: torch.Tensor | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """`x1 [N, K]` and `x2 [K, M]` int8, a float32 `scale [M]` and one per row, in BF16; or exact sums in int32."""
        ...


class NpuProducts(PlainProducts):
    """FP8, which these devices do not have, goes by values."""

    def __init__(self, operations: QuantisedOperations) -> None:
        self._operations = operations

    def int8_linear(
        self, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        if x.dtype != torch.bfloat16:
            return super().int8_linear(x, codes, scale)
        row_codes, row_scale = self._operations.npu_dynamic_quant(x)
        return self._operations.npu_quant_matmul(
            row_codes, codes.T, scale, pertoken_scale=row_scale, output_dtype=x.dtype
        )

    def int8_sums(self, row_codes: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Float64, which plain torch would take, is not to be had either."""
        ones = torch.ones(codes.shape[0], device=codes.device)
        return self._operations.npu_quant_matmul(row_codes, codes.T, ones, output_dtype=torch.int32)


def npu_products() -> NpuProducts:
    """Imports torch-npu, which choosing the device has done before."""
    import torch_npu

    return NpuProducts(cast(QuantisedOperations, torch_npu))
