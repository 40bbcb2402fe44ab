"""How one matrix is kept in a file: plain, or as codes with scales. Knows names, types and shapes; no arithmetic."""

from __future__ import annotations

import enum
from dataclasses import dataclass

FP8_BLOCK = 128
"""Rows and columns that share a scale."""
FP4_GROUP = 32
"""Inputs of a row that share a scale."""


class Storage(enum.Enum):
    """One matrix on disk."""

    PLAIN = "plain"
    FP8 = "FP8 e4m3 in 128x128 blocks"
    """`.weight` F8_E4M3, `.scale` F8_E8M0 by block."""
    FP4 = "FP4 e2m1 in groups of 32"
    """`.weight` I8 with two codes a byte, low nibble first; `.scale` F8_E8M0 by group."""
    INT8 = "INT8 by row"
    """`.weight` I8, `.scale` F32 by row."""
    INT8_OFFSET = "INT8 by row with offset"
    """`.weight` I8, `.weight_scale` and `.weight_offset` F32, `[rows, 1]`."""


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a matrix."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def parts(storage: Storage, name: str, shape: tuple[int, ...], dtype: str) -> tuple[Part, ...]:
    """What is stored for the matrix `name`, itself first; `dtype` is its type when it is plain."""
    if storage is Storage.PLAIN:
        return (Part(name, dtype, shape),)
    rows, columns = shape
    stem = name.removesuffix("weight")
    match storage:
        case Storage.FP8:
            blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
            return (
                Part(name, "F8_E4M3", shape),
                Part(f"{stem}scale", "F8_E8M0", blocks),
            )
        case Storage.FP4:
            return (
                Part(name, "I8", (rows, columns // 2)),
                Part(f"{stem}scale", "F8_E8M0", (rows, columns // FP4_GROUP)),
            )
        case Storage.INT8:
            return Part(name, "I8", shape), Part(f"{stem}scale", "F32", (rows,))
        case Storage.INT8_OFFSET:
            return (
                Part(name, "I8", shape),
                Part(f"{name}_scale", "F32", (rows, 1)),
                Part(f"{name}_offset", "F32", (rows, 1)),
            )


def scale_names(storage: Storage, name: str) -> tuple[str, ...]:
    """Names of what a storage keeps beside the matrix `name`, whatever else there may be."""
    scale, modelslim_scale, offset = companions(name)
    match storage:
        case Storage.PLAIN:
            return ()
        case Storage.INT8_OFFSET:
            return modelslim_scale, offset
        case _:
            return (scale,)


def companions(name: str) -> tuple[str, ...]:
    """Every name under which some storage keeps scales of the matrix `name`."""
    return (f"{name.removesuffix('weight')}scale", f"{name}_scale", f"{name}_offset")
