"""Byte ranges that are written together. Knows numbers only; not whose they are."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt


class ByteRange(NamedTuple):
    """Bytes of one region to copy from the sender's buffer to the receiver's."""

    region: int
    """Index in the layout."""
    source_offset: int
    destination_offset: int
    length: int


class ByteRanges(Sequence[ByteRange]):
    """The ranges of a write, kept as one table: a hand-off may have thousands, and some engines take them as they are."""

    def __init__(self, numbers: array[int]) -> None:
        """`numbers` is the table row by row, with the type code "Q"; it must not change any more."""
        self.table: npt.NDArray[np.uint64] = np.frombuffer(numbers, np.uint64).reshape(-1, 4)
        """`[ranges, 4]`, the columns of `ByteRange`."""
        self.regions, self.lengths = self.table[:, 0], self.table[:, 3]
        self.offsets = self.table[:, 1:3].T
        """`[2, ranges]`: source, destination."""
        self.num_bytes: int = sum(numbers[3::4])

    @classmethod
    def of(cls, ranges: Iterable[ByteRange]) -> ByteRanges:
        return cls(array("Q", itertools.chain.from_iterable(ranges)))

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[ByteRange]:
        return map(ByteRange._make, self.table.tolist())

    @overload
    def __getitem__(self, index: int) -> ByteRange: ...
    @overload
    def __getitem__(self, index: slice) -> ByteRanges: ...
    def __getitem__(self, index: int | slice) -> ByteRange | ByteRanges:
        if isinstance(index, slice):
            return ByteRanges(array("Q", self.table[index].tobytes()))
        return ByteRange._make(self.table[index].tolist())
