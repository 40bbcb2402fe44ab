"""From stored codes and scales to float32 values. Knows the storages of `storage.py`; no names and no files.

Matrices may be parts: `first_row` and `first_column` say where in the whole one the codes begin, as scales do not move.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from common.checkpoint.storage import FP4_GROUP, FP8_BLOCK, Storage

FP8_LOOK_UPS = 1 << 18
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the lower three bits of a code; the fourth is the sign."""


def dequantize(
    storage: Storage,
    codes: torch.Tensor,
    scales: Sequence[torch.Tensor],
    first_row: int = 0,
    first_column: int = 0,
) -> torch.Tensor:
    """Codes of any quantised storage with what scales it has."""
    match storage:
        case Storage.FP8:
            return dequantize_fp8(codes, scales[0], first_row, first_column)
        case Storage.FP4:
            return dequantize_fp4(codes, scales[0], first_row, first_column)
        case Storage.INT8_OFFSET:
            return dequantize_int8(codes, scales[0], scales[1], first_row)
        case Storage.INT8:
            return dequantize_int8(codes, scales[0], None, first_row)
        case Storage.PLAIN:
            raise AssertionError("plain values have no codes")


def e8m0_to_float(scale: torch.Tensor) -> torch.Tensor:
    """Powers of two from biased exponents: 0 is 2^-127, 254 is 2^127, 255 is not a number."""
    exponents = scale.view(torch.uint8).to(torch.int32)
    bits = exponents << 23
    bits[exponents == 0] = 1 << 22  # 2^-127 is below float32's normal numbers
    bits[exponents == 255] = 0x7FC0_0000
    return bits.view(torch.float32)


def dequantize_fp8(
    codes: torch.Tensor, scale: torch.Tensor, first_row: int = 0, first_column: int = 0
) -> torch.Tensor:
    """`codes [rows, columns]` F8_E4M3 with one scale per 128x128 block of the whole matrix."""
    rows, columns = codes.shape
    values = _fp8_to_float(codes)
    first_block, end_block = first_row // FP8_BLOCK, -(-(first_row + rows) // FP8_BLOCK)
    by_column = e8m0_to_float(scale[first_block:end_block]).repeat_interleave(FP8_BLOCK, dim=1)
    by_column = by_column[:, first_column : first_column + columns]
    begin = 0
    for num_blocks, num_rows in _row_blocks(first_row, rows):
        blocks, by_column = by_column[:num_blocks], by_column[num_blocks:]
        run = values[begin : begin + num_blocks * num_rows].view(num_blocks, num_rows, columns)
        run *= blocks.unsqueeze(1)
        begin += num_blocks * num_rows
    return values


def dequantize_fp4(
    codes: torch.Tensor, scale: torch.Tensor, first_row: int = 0, first_column: int = 0
) -> torch.Tensor:
    """`codes [rows, columns / 2]` with two FP4 codes a byte, low nibble first, and a scale per 32 columns of a row."""
    rows, columns = codes.shape[0], codes.shape[1] * 2
    assert first_column % FP4_GROUP == 0 and columns % FP4_GROUP == 0, (
        f"a part of an FP4 matrix must not cut a group: {first_column=} {columns=}"
    )
    first_group = first_column // FP4_GROUP
    chosen = scale[first_row : first_row + rows, first_group : first_group + columns // FP4_GROUP]
    bytes_ = codes.view(torch.uint8).to(torch.int32).flatten()
    pairs = _fp4_pairs(codes.device).index_select(0, bytes_)
    values = pairs.view(torch.float32).view(rows, -1, FP4_GROUP)
    values *= e8m0_to_float(chosen.contiguous()).unsqueeze(-1)
    return values.view(rows, columns)


def dequantize_int8(
    codes: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None = None,
    first_row: int = 0,
) -> torch.Tensor:
    """`codes [rows, columns]` with a float32 scale, and where there is one an offset, per row."""
    values = codes.to(torch.float32)
    chosen = slice(first_row, first_row + codes.shape[0])
    if offset is not None:
        values -= offset.view(-1, 1)[chosen]
    values *= scale.view(-1, 1)[chosen]
    return values


def _fp8_to_float(codes: torch.Tensor) -> torch.Tensor:
    if codes.is_cuda:
        return codes.to(torch.float32)
    # Looked up: CPUs convert one by one, NPUs need not know the type. A few rows at a time stay in a CPU's cache.
    table = _fp8_values(codes.device)
    values = torch.empty(codes.shape, device=codes.device)
    num_rows = max(1, FP8_LOOK_UPS // max(1, codes.shape[1]))
    rooms = torch.split(values, num_rows)
    for some, room in zip(torch.split(codes, num_rows), rooms, strict=True):
        indices = some.view(torch.uint8).to(torch.int32).flatten()
        torch.index_select(table, 0, indices, out=room.view(-1))
    return values


def _row_blocks(first_row: int, num_rows: int) -> Iterator[tuple[int, int]]:
    """Blocks of the whole matrix that rows of a part lie in: how many one after the other have how many of them."""
    if head := min(-first_row % FP8_BLOCK, num_rows):
        yield 1, head
    num_blocks, tail = divmod(num_rows - head, FP8_BLOCK)
    if num_blocks:
        yield num_blocks, FP8_BLOCK
    if tail:
        yield 1, tail


@functools.cache
def _fp8_values(device: torch.device) -> torch.Tensor:
    """The value of every byte."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return every.to(torch.float32).to(device)


@functools.cache
def _fp4_pairs(device: torch.device) -> torch.Tensor:
    """The two float32 values of every byte, as one integer: a single look-up per byte."""
    signed = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    byte = torch.arange(256)
    pairs = torch.stack((signed[byte & 15], signed[byte >> 4]), dim=1)
    return pairs.view(torch.int64).flatten().to(device)
