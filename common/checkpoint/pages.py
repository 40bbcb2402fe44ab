"""Advice to the system about pages of this process's memory. Knows addresses; nothing of what is there."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import cast

UNNEEDED = getattr(mmap, "MADV_DONTNEED", None)
POPULATE = 22
"""MADV_POPULATE_READ of Linux 5.14, which the mmap module does not name."""
POPULATE_FOR_WRITING = 23
"""MADV_POPULATE_WRITE, its sibling."""


def provide(address: int, num_bytes: int) -> None:
    """Let the system make all pages of a room at once that is about to be filled; else each is made at its first byte."""
    begin = address - address % mmap.PAGESIZE
    advise(begin, address + num_bytes - begin, POPULATE_FOR_WRITING)


def advise(address: int, num_bytes: int, advice: int | None) -> int:
    """Give advice about whole pages; 0, or the error's number, which is ENOSYS where a system knows no advice.

    Other threads run while the system works, which the mmap module's own call does not let them.
    """
    if num_bytes <= 0:
        return 0
    if _madvise is None or advice is None:
        return errno.ENOSYS
    return 0 if _madvise(address, num_bytes, advice) == 0 else ctypes.get_errno()


def _system_madvise() -> Callable[[int, int, int], int] | None:
    if os.name != "posix":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return cast(Callable[[int, int, int], int], function)


_madvise = _system_madvise()
