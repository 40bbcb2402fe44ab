"""Counter-based noise: a function of (seed, position, purpose, depth, token id) and of nothing else.

Knows no batch, no stream and no state, so a row's noise is the same in every batch, on every worker and after a restart,
and the noise of a vocabulary shard is a slice of the whole. The hash and the values of `Purpose` are part of what a
seed means: changing either changes the text of every seeded request.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor


class Purpose(enum.IntEnum):
    """What the noise decides; each has its own, independent of the others at the same position."""

    DRAFT = 0
    """The drafter's draw, where the target will check it by rejection."""
    ACCEPT = 1
    """Whether a draft is accepted by rejection."""
    TARGET = 2
    """The target's own draw, and the drafter's where verification is coupled."""
    RESIDUAL = 3
    """The target's own draw in rejection: what replaces a refused draft, or follows when none was refused."""


def gumbel(
    *,
    seeds: Tensor,
    positions: Tensor,
    purpose: Purpose | Tensor,
    vocab_size: int,
    vocab_offset: int = 0,
    depth: Tensor | int = 0,
) -> Tensor:
    """Standard Gumbel noise [N, vocab_size] float32 for tokens vocab_offset onwards; always finite.

    `seeds` and `positions` are [N] int64; `purpose` and `depth` are one for all rows or [N] int64. `depth` below 256
    tells apart draws for one position that must not resemble each other: the drafts of successive proposals.
    """
    keys = _row_keys(seeds, positions, purpose, depth)[:, None]
    # Wrapping products: token v has the same counter in every shard.
    counters = torch.arange(vocab_offset, vocab_offset + vocab_size, device=seeds.device)
    counters *= _TOKEN_STEP
    noise = torch.empty(len(keys), vocab_size, dtype=torch.float32, device=seeds.device)
    for rows, out in zip(_blocks(keys, vocab_size), _blocks(noise, vocab_size), strict=True):
        out.copy_(_high_bits(rows + counters))
        # E = -log(1 - u) with u = (bits + 1/2) / 2^32: the winners have the smallest E, where floats are densest.
        # The scale is a hair below 2^-32, so that bits that round up to 2^32 do not make E infinite.
        out.mul_(-_UNIT).sub_(_UNIT / 2).log1p_()
        out.neg_().log_().neg_()
    return noise


def uniform(*, seeds: Tensor, positions: Tensor, purpose: Purpose | Tensor) -> Tensor:
    """Uniform noise [N] float32 in [0, 1), in steps of 2^-24; arguments as for `gumbel`."""
    keys = _row_keys(seeds, positions, purpose, depth=0)
    return _shift_right(keys, 40).to(torch.float32).mul_(2.0**-24)


def _row_keys(
    seeds: Tensor, positions: Tensor, purpose: Purpose | Tensor, depth: Tensor | int
) -> Tensor:
    """A well-mixed 64-bit key per row."""
    counters = (positions * _NUM_DEPTHS + depth) * len(Purpose) + purpose
    return _mix(seeds * _SEED_STEP + counters * _COUNTER_STEP)


def _mix(x: Tensor) -> Tensor:
    """The SplitMix64 finaliser, in place: a bijection in which every input bit moves every output bit."""
    x ^= _shift_right(x, 30)
    x *= _MULTIPLIER_1
    x ^= _shift_right(x, 27)
    x *= _MULTIPLIER_2
    x ^= _shift_right(x, 31)
    return x


def _high_bits(x: Tensor) -> Tensor:
    """The upper 32 bits of `_mix`, as int64, in place; its last step reaches only lower bits and is left out."""
    shifted = _shift_right(x, 30)
    x ^= shifted
    x *= _MULTIPLIER_1
    x ^= _shift_right(x, 27, out=shifted)
    x *= _MULTIPLIER_2
    return _shift_right(x, 32, out=shifted)


def _shift_right(x: Tensor, count: int, *, out: Tensor | None = None) -> Tensor:
    """Logical shift; torch shifts int64 arithmetically."""
    shifted = torch.bitwise_right_shift(x, count, out=out)
    shifted &= (1 << (64 - count)) - 1
    return shifted


def _blocks(rows: Tensor, vocab_size: int) -> tuple[Tensor, ...]:
    """Views of whole rows, so that the int64 intermediates stay small next to the logits of a large batch."""
    return torch.split(rows, max(1, _BLOCK_ELEMENTS // max(1, vocab_size)))


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


_NUM_DEPTHS = 256
# Odd, and without small multiples that meet modulo 2^64, so that small seeds, counters and ids never collide.
_SEED_STEP = _signed(0x9E3779B97F4A7C15)
_COUNTER_STEP = _signed(0xDA942042E4DD58B5)
_TOKEN_STEP = _signed(0xD1342543DE82EF95)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)
_UNIT = (1.0 - 2.0**-24) * 2.0**-32
_BLOCK_ELEMENTS = 1 << 24
