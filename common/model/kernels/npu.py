"""The kernels for Ascend devices: fused operations of torch-npu, and no complex numbers, which its operators lack."""

from __future__ import annotations

from typing import Protocol, cast

import torch

from common.model.kernels.plain import PlainKernels


class FusedOperations(Protocol):
    """What is used of the package `torch_npu`."""

    def npu_rms_norm(
        self, x: torch.Tensor, gamma: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class NpuKernels(PlainKernels):
    """Plain torch where there is no operator for it."""

    def __init__(self, operations: FusedOperations) -> None:
        self._operations = operations

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._operations.npu_rms_norm(x, weight, eps)[0]

    def rotate(
        self, x: torch.Tensor, rotations: torch.Tensor, *, inverse: bool = False
    ) -> torch.Tensor:
        turns = torch.view_as_real(rotations).unsqueeze(1)  # [N, 1, rope_dim / 2, 2]
        cos, sin = turns[..., 0], turns[..., 1]
        sin = -sin if inverse else sin
        rope_dim = 2 * cos.shape[-1]
        pairs = x[..., -rope_dim:].float().reshape(*x.shape[:-1], -1, 2)
        even, odd = pairs[..., 0], pairs[..., 1]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        return torch.cat((x[..., :-rope_dim], turned.flatten(-2).to(x.dtype)), dim=-1)


def npu_kernels() -> NpuKernels:
    """Imports torch-npu, which choosing the device has done before."""
    import torch_npu

    return NpuKernels(cast(FusedOperations, torch_npu))
