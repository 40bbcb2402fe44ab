"""One side's regions as NIXL addresses them. Knows addresses and kinds of memory; asks NIXL for nothing."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from common.transfer.plan import ByteRange

Numbers = npt.NDArray[np.uint64]


class NixlMemory:
    """Regions of a pool, on one device."""

    def __init__(self, region_addresses: Sequence[int], device: str) -> None:
        """`device` as torch writes it."""
        kind, _, number = device.partition(":")
        self._kind = "DRAM" if kind == "cpu" else "VRAM"
        self._device = 0 if kind == "cpu" else int(number or 0)
        self._addresses = np.array(region_addresses, dtype=np.uint64)

    @property
    def num_regions(self) -> int:
        return len(self._addresses)

    def descriptors(self, region: Numbers, offset: Numbers, length: Numbers) -> tuple[Numbers, str]:
        """What NIXL takes: `[ranges, 3]` of address, length and device number, and the kind of memory."""
        described = np.empty((len(region), 3), dtype=np.uint64)
        np.add(self._addresses[region], offset, out=described[:, 0])
        described[:, 1] = length
        described[:, 2] = self._device
        return described, self._kind


def columns(ranges: Iterable[ByteRange]) -> Numbers:
    """`[4, ranges]`: region, source offset, destination offset, length.

    By way of a flat array, which is several times faster than numpy's own way from tuples.
    """
    flat = array("Q", itertools.chain.from_iterable(ranges))
    return np.frombuffer(flat, dtype=np.uint64).reshape(-1, 4).T


def host_bytes(address: int, length: int) -> tuple[Numbers, str]:
    """Descriptors of one range of host memory that belongs to no region."""
    return np.array([[address, length, 0]], dtype=np.uint64), "DRAM"
