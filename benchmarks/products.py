"""What a product with a quantised matrix costs in each of the three ways to hold it, on this machine's CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.report import Value
from common.checkpoint.held import EightBitMatrix, HeldMatrix
from common.checkpoint.quantize import quantize_fp4, quantize_fp8, quantize_int8
from common.checkpoint.storage import Storage
from common.model.kernels import select_products

SHAPE = (2048, 4096)
"""Rows and columns of an expert's `w1` in Flash."""
NUM_ROWS = (1, 8, 64)
"""Of activations: a decode row, a verified proposal, a small batch."""
QUANTISERS = {
    Storage.INT8: quantize_int8,
    Storage.FP8: quantize_fp8,
    Storage.FP4: quantize_fp4,
}
SECONDS_EACH = 0.5


@torch.inference_mode()
def run_products(say: Callable[[str], None]) -> dict[str, Value]:
    """Microseconds of one product, the least of many; `values` is what `dequantize` pays in every format."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(SHAPE, generator=generator)
    figures: dict[str, Value] = {}
    for storage, quantise in QUANTISERS.items():
        name = storage.name.lower()
        say(f"products with {name} matrices of {SHAPE[0]} x {SHAPE[1]}")
        ways = _ways(storage, *quantise(values))
        for num_rows in NUM_ROWS:
            x = torch.randn(num_rows, SHAPE[1], generator=generator)
            for way, product in ways.items():
                figures[f"products.{name}.{num_rows}_rows.{way}_us"] = _least_us(product, x)
    return figures


def _ways(
    storage: Storage, codes: torch.Tensor, scale: torch.Tensor
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    native = HeldMatrix(storage, codes, (scale,), first_row=0, first_column=0, dtype=torch.float32)
    values = native.values()
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "values": lambda x: F.linear(x, values),
        "native": native.linear,
    }
    if storage is not Storage.FP4:
        ways["w8a8"] = EightBitMatrix(
            storage,
            codes,
            (scale,),
            select_products(codes.device),
            first_row=0,
            first_column=0,
            dtype=torch.float32,
        ).linear
    return ways


def _least_us(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    product(x)
    least, until = float("inf"), time.perf_counter() + SECONDS_EACH
    while (began := time.perf_counter()) < until:
        product(x)
        least = min(least, time.perf_counter() - began)
    return least * 1e6
