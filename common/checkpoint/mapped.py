"""Tensors of a safetensors file as views on its mapped bytes. Knows offsets and pages; no names' meaning."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from common.checkpoint.headers import StoredTensor
from common.checkpoint.spans import Span
from common.errors import CheckpointError

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}

_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which the mmap module does not name
_UNKNOWN = (errno.EINVAL, errno.ENOSYS)


class MappedFile:
    """One file, mapped. A view stays valid as long as it lives; pages that `drop` let go are read again when touched."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            # Private: torch wants a buffer that may be written, though nobody does.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._fd = os.dup(file.fileno())
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        """Give the descriptor back; the mapping goes with its last view."""
        os.close(self._fd)

    def view(self, tensor: StoredTensor) -> torch.Tensor:
        dtype = TORCH_DTYPES.get(tensor.dtype)
        if dtype is None:
            raise CheckpointError(
                f"tensor {tensor.name} has type {tensor.dtype}, which this server cannot read",
                metadata={"tensor": tensor.name},
            )
        if tensor.num_bytes == 0:
            return torch.empty(tensor.shape, dtype=dtype)
        raw = torch.frombuffer(
            self._map, dtype=torch.uint8, offset=tensor.begin, count=tensor.num_bytes
        )
        if tensor.begin % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(tensor.shape)

    def bytes_of(self, span: Span) -> memoryview:
        return memoryview(self._map)[span.begin : span.end]

    def expect(self, span: Span) -> None:
        """Let the system start reading what will be wanted soon; where it cannot, nothing is lost."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(
                    self._fd, span.begin, span.end - span.begin, os.POSIX_FADV_WILLNEED
                )

    def fetch(self, span: Span) -> None:
        """Wait until a span is in memory, where the system can say so; else its first use waits."""
        self._advise(_POPULATE_READ, span.begin - span.begin % mmap.PAGESIZE, span.end)

    def drop(self, span: Span) -> None:
        """Let a span go from this process's memory; the system may keep it cached."""
        first, last = -(-span.begin // mmap.PAGESIZE), span.end // mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._advise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, last * mmap.PAGESIZE)

    def _advise(self, advice: int, begin: int, end: int) -> None:
        if _madvise is None:
            return
        # Not the mmap module's own call: that one keeps all other threads from running while storage is waited for.
        if _madvise(self._address + begin, end - begin, advice) == 0:
            return
        number = ctypes.get_errno()
        # An older kernel does not know the advice; anything else is a file that cannot be read.
        if advice == _POPULATE_READ and number not in _UNKNOWN:
            raise CheckpointError(f"cannot read {self._path}: {os.strerror(number)}")


def _system_madvise() -> Callable[[int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return cast(Callable[[int, int, int], int], function)


_madvise = _system_madvise()
