"""Tensors of a safetensors file as views on its mapped bytes. Knows offsets and pages; no names' meaning."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path

import torch

from common.checkpoint import pages
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

    def read(self, span: Span, room: memoryview) -> None:
        """Copy a span into memory of its size, without mapping it."""
        done = 0
        while done < span.num_bytes:
            try:
                num_bytes = os.preadv(self._fd, [room[done:]], span.begin + done)
            except OSError as error:
                raise CheckpointError(f"cannot read {self._path}: {error.strerror}") from error
            if num_bytes == 0:
                raise CheckpointError(f"{self._path} ends at byte {span.begin + done}")
            done += num_bytes

    def expect(self, span: Span) -> None:
        """Let the system start reading what will be wanted soon; where it cannot, nothing is lost."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(
                    self._fd, span.begin, span.end - span.begin, os.POSIX_FADV_WILLNEED
                )

    def fetch(self, span: Span) -> None:
        """Wait until a span is in memory, so that its use waits for nothing."""
        begin = span.begin - span.begin % mmap.PAGESIZE
        number = pages.advise(self._address + begin, span.end - begin, pages.POPULATE)
        if number in (errno.EINVAL, errno.ENOSYS):
            # A kernel before 5.14, or another system, does not know the advice.
            self._touch(begin, span.end)
        elif number:
            raise CheckpointError(f"cannot read {self._path}: {os.strerror(number)}")

    def _touch(self, begin: int, end: int) -> None:
        """Use a byte of every page. By torch, which lets other threads run while the system reads."""
        if begin < end:
            whole = torch.frombuffer(self._map, dtype=torch.uint8, offset=begin, count=end - begin)
            whole[:: mmap.PAGESIZE].max()

    def drop(self, span: Span) -> None:
        """Let a span go from this process's memory; the system may keep it cached."""
        first, last = -(-span.begin // mmap.PAGESIZE), span.end // mmap.PAGESIZE
        begin, num_bytes = first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE
        pages.advise(self._address + begin, num_bytes, pages.UNNEEDED)
