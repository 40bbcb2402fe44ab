"""Chooses the kernels for a device. The only place that knows all of them."""

from __future__ import annotations

import torch

from common.model.kernels.interface import Kernels
from common.model.kernels.plain import PlainKernels


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest version that runs on the device in the model's dtype."""
    if device.type == "cpu" and dtype == torch.float32:
        # Imported here: other devices need neither numba nor its half second of start-up.
        from common.model.kernels.cpu import CpuKernels

        return CpuKernels()
    return PlainKernels()
