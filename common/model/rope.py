"""Rotary positions over interleaved pairs, plain and YaRN (model.md of the reference system, section 2.3)."""

from __future__ import annotations

import math

import torch

from common.model.config import ModelConfig, RopeScaling

BLOCK_POSITIONS = 1 << 16
"""Rotations that are worked out at once, in double precision: a million would take a gigabyte of the host."""


class RopeTable:
    """Unit complex numbers for every position, `[positions, rope_dim / 2]`."""

    def __init__(self, frequencies: torch.Tensor, max_positions: int, device: torch.device) -> None:
        shape = (max_positions, frequencies.numel())
        self._table = torch.empty(shape, dtype=torch.complex64, device=device)
        if device.type == "meta":
            return
        for begin in range(0, max_positions, BLOCK_POSITIONS):
            positions = torch.arange(
                begin, min(begin + BLOCK_POSITIONS, max_positions), dtype=torch.float64
            )
            angles = torch.outer(positions, frequencies.double())
            self._table[begin : begin + BLOCK_POSITIONS] = torch.polar(
                torch.ones_like(angles), angles
            )

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Rotations of shape `positions.shape + [rope_dim / 2]`."""
        return self._table[positions]


def window_rope(config: ModelConfig, device: torch.device) -> RopeTable:
    """Rotations of ratio-0 layers and of the drafter."""
    frequencies = _frequencies(config.rope_theta, config.qk_rope_head_dim)
    return RopeTable(frequencies, config.max_position_embeddings, device)


def compressed_rope(config: ModelConfig, device: torch.device) -> RopeTable:
    """Rotations of layers with a compressor, YaRN applied; attention is not rescaled (no mscale)."""
    frequencies = _frequencies(config.compress_rope_theta, config.qk_rope_head_dim)
    frequencies = _yarn(frequencies, config.compress_rope_theta, config.rope_scaling)
    return RopeTable(frequencies, config.max_position_embeddings, device)


def _frequencies(theta: float, rope_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim
    return 1.0 / theta**exponents


def _yarn(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    rope_dim = 2 * frequencies.numel()

    def dim_of(num_rotations: float) -> float:
        turns = scaling.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return rope_dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), rope_dim - 1)
    steps = torch.arange(frequencies.numel(), dtype=torch.float64)
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
