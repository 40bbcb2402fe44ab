"""What is sent in one measurement: so many bytes in so many pieces. Knows sizes and offsets; no memory and no peer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from common.transfer.ranges import ByteRange, ByteRanges

_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
MAX_SIZE_BYTES = 4 << 30
"""Held once by the receiver and twice by the sender."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Bytes in equal ranges that lie one after the other at the sender and in disorder at the receiver."""

    size_bytes: int
    num_ranges: int

    def __post_init__(self) -> None:
        if self.num_ranges < 1 or self.size_bytes % self.num_ranges:
            raise ConfigError(
                f"{size_name(self.size_bytes)} cannot be divided into {self.num_ranges} equal ranges"
            )

    @property
    def name(self) -> str:
        """As figures are named, for example "64MiB.1024_ranges"."""
        ranges = "range" if self.num_ranges == 1 else "ranges"
        return f"{size_name(self.size_bytes)}.{self.num_ranges}_{ranges}"

    def ranges(self) -> ByteRanges:
        """In the sender's order; the same in every process."""
        length = self.size_bytes // self.num_ranges
        places = list(range(self.num_ranges))
        random.Random(self.num_ranges).shuffle(places)
        return ByteRanges.of(
            ByteRange(
                region=0,
                source_offset=index * length,
                destination_offset=place * length,
                length=length,
            )
            for index, place in enumerate(places)
        )


def parse_patterns(sizes: Sequence[str], ranges: Sequence[str]) -> tuple[Pattern, ...]:
    """Every size in every number of ranges, smallest first. Raises ConfigError that names what cannot be read."""
    all_bytes = sorted({parse_size(size) for size in sizes})
    counts = sorted({_parse_count(count) for count in ranges})
    return tuple(
        Pattern(size_bytes=size, num_ranges=count) for size in all_bytes for count in counts
    )


def parse_size(text: str) -> int:
    """Bytes of "64MiB", "4 KiB" or "4096". Raises ConfigError."""
    digits, factor = text.strip(), 1
    for unit, unit_bytes in _UNITS.items():
        if digits.endswith(unit):
            digits, factor = digits.removesuffix(unit).strip(), unit_bytes
            break
    if not digits.isdecimal() or not 0 < int(digits) * factor <= MAX_SIZE_BYTES:
        raise ConfigError(
            f"{text!r} is not a size; give one such as 4MiB, at most {size_name(MAX_SIZE_BYTES)}"
        )
    return int(digits) * factor


def size_name(num_bytes: int) -> str:
    """The shortest exact name, for example "64MiB"."""
    unit, factor = next((u, f) for u, f in _UNITS.items() if num_bytes % f == 0)
    return f"{num_bytes // factor}{unit}"


def _parse_count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(f"{text!r} is not a number of ranges; give one such as 64")
    return int(text)
