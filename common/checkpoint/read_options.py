"""How weights are read, and how whoever waits for them is told. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How weights are read."""

    slow_mb_per_s: float = 500.0
    """Storage below this many 10^6 bytes per second is warned of; 0 never warns."""
    verify_digests: bool = True
    """Compare tensors that are read whole with the checkpoint's digests, where it has them."""
