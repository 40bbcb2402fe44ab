"""Chooses the kernels for a device. The only place that knows all of them."""

from __future__ import annotations

import logging

import torch

from common.model.kernels.eight_bits import EightBitProducts, PlainProducts
from common.model.kernels.interface import Kernels
from common.model.kernels.plain import PlainKernels

logger = logging.getLogger(__name__)


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest version that runs on the device in the model's dtype."""
    # Imported where they are chosen: no device has what the others need.
    match device.type:
        case "cpu" if dtype == torch.float32:
            from common.model.kernels.cpu import CpuKernels

            return CpuKernels()
        case "cuda":
            return _cuda_kernels()
        case "npu":
            from common.model.kernels.npu import npu_kernels

            return npu_kernels()
        case _:
            return PlainKernels()


def select_products(device: torch.device) -> EightBitProducts:
    """The fastest products of 8-bit matrices on the device."""
    match device.type:
        case "cpu":
            from common.model.kernels.cpu_products import cpu_products

            return cpu_products()
        case "cuda":
            from common.model.kernels.cuda_products import cuda_products

            return cuda_products(device)
        case "npu":
            from common.model.kernels.npu_products import npu_products

            return npu_products()
        case _:
            return PlainProducts()


def _cuda_kernels() -> Kernels:
    try:
        from common.model.kernels.cuda import CudaKernels
    except ModuleNotFoundError as error:
        # It comes with torch's CUDA wheels for Linux, and nowhere else.
        logger.warning("steps will be slower: %s is not installed", error.name)
        return PlainKernels()
    return CudaKernels()
