"""From values to stored codes and scales, as the published checkpoints were made. Knows storages; no names and no files."""

from __future__ import annotations

import torch

from common.checkpoint.dequantize import FP4_VALUES, e8m0_to_float
from common.checkpoint.storage import FP4_GROUP, FP8_BLOCK
from common.model.kernels.eight_bits import int8_rows

FP8_LARGEST = 448.0
FP4_LARGEST = 6.0
SMALLEST_FP8_AMAX = 1e-4
SMALLEST_FP4_AMAX = 6 * 2.0**-126


def quantize_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes F8_E4M3 `[rows, columns]` and scales F8_E8M0, one per 128x128 block; the last blocks may be smaller."""
    rows, columns = values.shape
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    padded = torch.zeros(blocks[0] * FP8_BLOCK, blocks[1] * FP8_BLOCK)
    padded[:rows, :columns] = values
    tiles = padded.view(blocks[0], FP8_BLOCK, blocks[1], FP8_BLOCK)
    scale = _power_of_two(tiles.abs().amax(dim=(1, 3)).clamp(min=SMALLEST_FP8_AMAX) / FP8_LARGEST)
    codes = (tiles / e8m0_to_float(scale)[:, None, :, None]).view(padded.shape)
    return codes[:rows, :columns].contiguous().to(torch.float8_e4m3fn), scale


def quantize_fp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes I8 `[rows, columns / 2]`, low nibble first, and scales F8_E8M0, one per 32 columns of a row."""
    rows, columns = values.shape
    assert columns % FP4_GROUP == 0, (
        f"FP4 groups need a multiple of {FP4_GROUP} columns: {columns=}"
    )
    groups = values.float().view(rows, -1, FP4_GROUP)
    scale = _power_of_two(groups.abs().amax(-1).clamp(min=SMALLEST_FP4_AMAX) / FP4_LARGEST)
    scaled = groups / e8m0_to_float(scale).unsqueeze(-1)
    codes = _nearest_fp4(scaled.abs()) | (scaled < 0).to(torch.uint8) << 3
    pairs = codes.view(rows, -1, 2)
    packed = pairs[..., 0] | pairs[..., 1] << 4
    return packed.view(torch.int8).contiguous(), scale


def quantize_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes I8 and float32 scales `[rows]`, symmetric: as activations are quantised."""
    return int8_rows(values)


def _power_of_two(ratio: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below, as F8_E8M0."""
    mantissa, exponent = torch.frexp(
        ratio.float()
    )  # ratio = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return (exponent + 127).clamp(0, 254).to(torch.uint8).view(torch.float8_e8m0fnu)


def _nearest_fp4(magnitude: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest values; in the middle, the one whose lowest bit is 0."""
    levels = torch.tensor(FP4_VALUES)
    middles = (levels[1:] + levels[:-1]) / 2
    # Below a middle to the lower neighbour, above to the upper; at it, `right` decides which.
    up = torch.bucketize(magnitude, middles, right=True)
    down = torch.bucketize(magnitude, middles, right=False)
    return torch.where(down % 2 == 0, down, up).to(torch.uint8)
