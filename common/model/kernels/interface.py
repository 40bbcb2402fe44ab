"""The interface of device-specific fast paths and their choice. The plain torch version is the specification."""

from __future__ import annotations

from typing import Protocol

import torch

Mixes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Kernels(Protocol):
    """Functions whose plain version spends most of its time in launching tiny operations."""

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
        """Turn raw mixes `[N, S * (2 + S)]` and their norm factor `[N]` into (pre `[N, S]`, post `[N, S]`, comb `[N, S, S]`).

        All float32; comb is made doubly stochastic by `iterations` Sinkhorn steps.
        """
        ...


def select_kernels(device: torch.device) -> Kernels:
    """The fastest version that runs on the device."""
    if device.type == "cpu":
        from common.model.kernels.cpu import CpuKernels

        return CpuKernels()
    from common.model.kernels.plain import PlainKernels

    return PlainKernels()
