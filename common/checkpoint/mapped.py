"""Tensors of a safetensors file as views on its mapped bytes. Knows offsets and pages; no names' meaning."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import torch

from common.checkpoint.headers import StoredTensor
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


class MappedFile:
    """One file, mapped. A view stays valid as long as it lives; pages that `drop` let go are read again when touched."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            # Private: torch wants a buffer that may be written, though nobody does.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._fd = os.dup(file.fileno())

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

    def bytes_of(self, tensor: StoredTensor) -> memoryview:
        return memoryview(self._map)[tensor.begin : tensor.end]

    def expect(self, begin: int, end: int) -> None:
        """Let the system start reading a range that will be wanted soon; where it cannot, nothing is lost."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def fetch(self, begin: int, end: int) -> None:
        """Wait until a range is in memory, where the system can say so; else its first use waits."""
        self._advise(_POPULATE_READ, begin - begin % mmap.PAGESIZE, end)

    def drop(self, begin: int, end: int) -> None:
        """Let a range go from this process's memory; the system may keep it cached."""
        first, last = -(-begin // mmap.PAGESIZE), end // mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._advise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, last * mmap.PAGESIZE)

    def _advise(self, advice: int, begin: int, end: int) -> None:
        try:
            self._map.madvise(advice, begin, end - begin)
        except OSError as error:
            # An older kernel does not know the advice; anything else is a file that cannot be read.
            if advice == _POPULATE_READ and error.errno not in (22, 38):
                raise CheckpointError(f"cannot read {self._path}: {error}") from error
