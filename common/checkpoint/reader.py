"""The tensors of a checkpoint by official name, as values: mapped, read when asked for, dequantised one at a time.

Knows files, storages and digests; nothing of the model but names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from common.checkpoint.dequantize import dequantize_fp4, dequantize_fp8, dequantize_int8
from common.checkpoint.digests import digest, load_digests
from common.checkpoint.formats import stored_as
from common.checkpoint.headers import Headers, StoredTensor, read_headers
from common.checkpoint.mapped import MappedFile
from common.checkpoint.meter import LoadMeter
from common.checkpoint.read_ahead import Range, ReadAhead
from common.checkpoint.storage import Storage, companions
from common.checkpoint.tensors import CONFIDENCE_HEAD, CONFIDENCE_HEAD_ALIAS
from common.errors import CheckpointError

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes in all."""

LARGEST_SCALE = 2.0**20
"""No published weight comes near it; what is above is a damaged scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How weights are read."""

    slow_mb_per_s: float = 500.0
    """Storage below this many 10^6 bytes per second is warned of; 0 never warns."""
    verify_digests: bool = True
    """Compare tensors that are read whole with the checkpoint's digests, where it has them."""


class CheckpointReader(Mapping[str, torch.Tensor]):
    """Values by official name; quantised matrices come as float32, others as they are stored. A context manager.

    What is handed out may be a view on the mapped file: it is good until the next tensor is asked for, and costs nothing
    more after it. Scales and other companions of a matrix are not tensors of their own here.
    """

    def __init__(
        self,
        checkpoint_dir: Path,
        on_progress: Progress | None = None,
        *,
        headers: Headers | None = None,
        wanted: Iterable[str] | None = None,
        options: ReadOptions | None = None,
    ) -> None:
        """`headers` are the checkpoint's when they are known already; `wanted` names what will be read, in its order."""
        options = options or ReadOptions()
        self._headers = read_headers(checkpoint_dir) if headers is None else headers
        self._on_progress = on_progress
        self._names = _official_names(self._headers)
        self._wanted = list(self._names) if wanted is None else list(wanted)
        self._digests = load_digests(checkpoint_dir) if options.verify_digests else {}
        self._meter = LoadMeter(checkpoint_dir, slow_mb_per_s=options.slow_mb_per_s)
        self._files: dict[Path, MappedFile] = {}
        self._ahead: ReadAhead | None = None
        self._last: list[StoredTensor] = []
        self._num_done = 0
        self._num_bytes = sum(t.num_bytes for name in self._wanted for t in self._stored(name))

    def __enter__(self) -> CheckpointReader:
        for tensor in self._headers.values():
            if tensor.path not in self._files:
                self._files[tensor.path] = MappedFile(tensor.path)
        stored = (tensor for name in self._wanted for tensor in self._stored(name))
        self._ahead = ReadAhead([Range(self._files[t.path], t.begin, t.end) for t in stored])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._ahead is not None
        self._ahead.close()
        self._drop_last()
        for file in self._files.values():
            file.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read(name, None, None)

    def part(self, name: str, rows: slice | None, columns: slice | None) -> torch.Tensor:
        """Some rows and columns of a matrix; only the pages that hold them are read. Digests are not looked at."""
        return self._read(name, rows, columns)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the values, without reading them."""
        stored = self._headers[self._names[name]]
        if stored_as(self._headers, stored.name) is Storage.FP4:
            return stored.shape[0], stored.shape[1] * 2
        return stored.shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _read(self, name: str, rows: slice | None, columns: slice | None) -> torch.Tensor:
        stored = self._stored(name)
        self._drop_last()
        self._last = stored
        is_whole = rows is None and columns is None
        for tensor in stored if is_whole else stored[1:]:
            self._fetch(tensor)
        value = self._value(self._names[name], stored, rows, columns)
        num_bytes = sum(tensor.num_bytes for tensor in stored)
        share = value.numel() / max(1, math.prod(self.shape(name)))
        self._meter.add(int(num_bytes * share))
        if self._ahead is not None:
            self._ahead.used(num_bytes)
        self._num_done += num_bytes
        if self._on_progress is not None:
            self._on_progress(self._num_done, self._num_bytes)
        return value

    def _value(
        self, name: str, stored: list[StoredTensor], rows: slice | None, columns: slice | None
    ) -> torch.Tensor:
        codes, *scales = (self._files[tensor.path].view(tensor) for tensor in stored)
        storage = stored_as(self._headers, name)
        if storage is Storage.PLAIN:
            codes = codes[rows] if rows is not None else codes
            return codes[:, columns] if columns is not None else codes
        for tensor, scale in zip(stored[1:], scales, strict=True):
            _require_sane(tensor, scale)
        matrix_columns = codes.shape[1] * (2 if storage is Storage.FP4 else 1)
        first_row, end_row, _ = (rows or slice(None)).indices(codes.shape[0])
        first_column, end_column, _ = (columns or slice(None)).indices(matrix_columns)
        per_code = 2 if storage is Storage.FP4 else 1
        codes = codes[first_row:end_row, first_column // per_code : end_column // per_code]
        match storage:
            case Storage.FP8:
                return dequantize_fp8(codes, scales[0], first_row, first_column)
            case Storage.FP4:
                return dequantize_fp4(codes, scales[0], first_row, first_column)
            case Storage.INT8:
                return dequantize_int8(codes, scales[0], None, first_row)
            case Storage.INT8_OFFSET:
                return dequantize_int8(codes, scales[0], scales[1], first_row)

    def _stored(self, name: str) -> list[StoredTensor]:
        """The matrix and its scales."""
        own_name = self._names[name]
        matrix = self._headers[own_name]
        if stored_as(self._headers, own_name) is Storage.PLAIN:
            return [matrix]
        others = [self._headers[n] for n in companions(own_name) if n in self._headers]
        if not others:
            scale = companions(own_name)[0]
            raise CheckpointError(
                f"the checkpoint lacks tensor {scale}", metadata={"tensor": scale}
            )
        return [matrix, *others]

    def _fetch(self, tensor: StoredTensor) -> None:
        file = self._files[tensor.path]
        with self._meter:
            file.fetch(tensor.begin, tensor.end)
        expected = self._digests.get(tensor.name)
        if expected is not None and digest(file.bytes_of(tensor)) != expected:
            raise CheckpointError(
                f"tensor {tensor.name} in {tensor.path} is damaged: its bytes do not match the checkpoint's digest",
                metadata={"tensor": tensor.name},
            )

    def _drop_last(self) -> None:
        for tensor in self._last:
            self._files[tensor.path].drop(tensor.begin, tensor.end)
        self._last = []


def _official_names(headers: Headers) -> dict[str, str]:
    """Official name to the stored one; scales are left out."""
    scales = {
        companion for name in headers if name.endswith("weight") for companion in companions(name)
    }
    names = {}
    for name in headers:
        if name in scales:
            continue
        official = name
        if name.endswith(CONFIDENCE_HEAD_ALIAS):
            official = name.removesuffix(CONFIDENCE_HEAD_ALIAS) + CONFIDENCE_HEAD
        names[official] = name
    return names


def _require_sane(tensor: StoredTensor, scale: torch.Tensor) -> None:
    """Refuse scales that no quantiser writes. A smaller error looks like any other scale: see `digests`."""
    values = scale.float()
    if tensor.name.endswith("offset"):
        is_sane = bool(values.isfinite().all())
    else:
        # NaN fails both comparisons.
        is_sane = bool(((values >= 0) & (values <= LARGEST_SCALE)).all())
    if not is_sane:
        raise CheckpointError(
            f"tensor {tensor.name} has scales that are not numbers or beyond {LARGEST_SCALE:.0f}; the file is damaged",
            metadata={"tensor": tensor.name},
        )
