"""The tensors of a checkpoint by official name, as values: mapped, read when asked for, dequantised a piece at a time.

Knows files, storages and digests; nothing of the model but names.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch

from common.checkpoint import pages
from common.checkpoint.dequantize import dequantize
from common.checkpoint.digests import RunningDigest, load_digests
from common.checkpoint.headers import Headers, StoredTensor, read_headers
from common.checkpoint.held import hold
from common.checkpoint.mapped import TORCH_DTYPES, MappedFile
from common.checkpoint.meter import LoadMeter
from common.checkpoint.read_ahead import ReadAhead, Wanted
from common.checkpoint.read_options import Progress, ReadOptions
from common.checkpoint.sanity import require_sane
from common.checkpoint.scales import ScalePart
from common.checkpoint.spans import Span, Window, num_bytes, spans, touched
from common.checkpoint.stored_parts import StoredParts
from common.device.staging import Staging
from common.errors import CheckpointError
from common.model.matrices import Matrix
from common.model.weights import TensorPart

PIECE_VALUES = 16 << 20
"""Values that are read and dequantised at once; an expert is less. As float32 they are 64 MiB."""


class CheckpointReader(Mapping[str, torch.Tensor]):
    """Values by official name; quantised matrices come as float32, others as they are stored. A context manager.

    What is handed out may be a view on the mapped file: it is good until the next tensor or piece is asked for, and costs
    nothing more after it. Scales and other companions of a matrix are not tensors of their own here.
    """

    def __init__(
        self,
        checkpoint_dir: Path,
        on_progress: Progress | None = None,
        *,
        headers: Headers | None = None,
        wanted: Iterable[TensorPart] | None = None,
        options: ReadOptions | None = None,
        num_readers: int = 1,
        piece_values: int = PIECE_VALUES,
    ) -> None:
        """`headers` are the checkpoint's when they are known already; `wanted` is what will be read, about in its order.

        `num_readers` threads will ask for pieces at a time.
        """
        options = options or ReadOptions()
        self._parts = StoredParts(read_headers(checkpoint_dir) if headers is None else headers)
        self._on_progress = on_progress
        self._piece_values = piece_values
        self._wanted = (
            [TensorPart(n) for n in self._parts.names] if wanted is None else list(wanted)
        )
        self._digests = load_digests(checkpoint_dir) if options.verify_digests else {}
        self._meter = LoadMeter(
            checkpoint_dir, slow_mb_per_s=options.slow_mb_per_s, num_readers=num_readers
        )
        self._files: dict[Path, MappedFile] = {}
        self._ahead: ReadAhead | None = None
        self._last: Generator[torch.Tensor] | None = None
        """What holds the tensor that was handed out last."""
        self._lock = threading.Lock()
        self._num_done = 0
        self.num_wanted_bytes = sum(map(self._parts.num_bytes, self._wanted))

    def __enter__(self) -> CheckpointReader:
        stored = (tensor for part in self._wanted for tensor in self._parts.tensors(part.name))
        for path in {tensor.path for tensor in stored}:
            self._file(path)
        self._ahead = ReadAhead(
            Wanted(
                tuple((self._files[path], span) for path, span in self._parts.touched(part)),
                self._parts.num_bytes(part),
            )
            for part in self._wanted
        )
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
        """All values of a tensor at once. One thread only."""
        self._drop_last()
        self._last = self._pieces(TensorPart(name), largest=None)
        return next(self._last)

    def read_into(self, part: TensorPart, room: torch.Tensor) -> bool:
        """Fill host memory with a part's values, with no copy in between; any thread may ask.

        False, with nothing done, where they are not stored as `room` has them or not side by side.
        """
        matrix, *scales = self._parts.tensors(part.name)
        window = self._parts.window(part)
        is_as_stored = not scales and TORCH_DTYPES.get(matrix.dtype) == room.dtype
        is_one_run = window.has_whole_rows and room.is_contiguous()
        if room.device.type != "cpu" or not is_as_stored or not is_one_run:
            return False
        (span,) = spans(matrix, window)
        if span.num_bytes:
            values = room.view(-1).view(torch.uint8).numpy().data
            pages.provide(room.data_ptr(), span.num_bytes)
            with self._meter:
                self._file(matrix.path).read(span, values)
            if part.is_whole and matrix.name in self._digests:
                digest = RunningDigest()
                digest.add(values)
                self._require_digest(matrix, digest)
        self._count(span.num_bytes)
        return True

    def pieces(self, part: TensorPart) -> Generator[torch.Tensor]:
        """Runs of a part's rows, in order. Only pages that hold them are read; digests are looked at for whole tensors.

        Any thread may ask; it must take all pieces or close the generator.
        """
        return self._pieces(part, largest=self._piece_values)

    def held(
        self, part: TensorPart, *, dtype: torch.dtype, device: torch.device, staging: Staging
    ) -> Matrix | None:
        """A part of a matrix as it is stored, for products in `dtype`; None when it is stored as values."""
        matrix, *scales = self._parts.tensors(part.name)
        if not scales:
            return None
        window = self._parts.window(part)
        values_per_item = self._parts.values_per_item(matrix)
        return hold(
            self._parts.storage(matrix),
            window,
            self._pieces(part, largest=self._piece_values, as_codes=True),
            [self._scale(matrix, scale, part).to(device) for scale in scales],
            self._parts.scale_part(matrix, scales[0], window),
            codes=torch.empty(
                (window.num_rows, window.num_columns_taken // values_per_item),
                dtype=TORCH_DTYPES[matrix.dtype],
                device=device,
            ),
            dtype=dtype,
            staging=staging,
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the values, without reading them."""
        return self._parts.shape(name)

    @property
    def mb_per_s(self) -> float:
        """10^6 bytes per second of what was read so far, dequantisation included."""
        return self._meter.mb_per_s

    def __contains__(self, name: object) -> bool:
        # A mapping's own way would read the tensor.
        return name in self._parts.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts.names)

    def __len__(self) -> int:
        return len(self._parts.names)

    def _pieces(
        self, part: TensorPart, *, largest: int | None, as_codes: bool = False
    ) -> Generator[torch.Tensor]:
        matrix, *scales = self._parts.tensors(part.name)
        window = self._parts.window(part)
        digest = RunningDigest() if part.is_whole and matrix.name in self._digests else None
        scale_values = [] if as_codes else [self._scale(matrix, scale, part) for scale in scales]
        has_values = as_codes or not scales
        origin = None if has_values else self._parts.scale_part(matrix, scales[0], window)
        file, per_item = self._file(matrix.path), self._parts.values_per_item(matrix)
        for run in window.runs(largest or max(1, window.num_values)):
            read = list(touched(matrix, run, per_item))
            self._fetch(file, read)
            if digest is not None:
                digest.add(file.bytes_of(read[0]))
                if run.end_row == window.end_row:
                    self._require_digest(matrix, digest)
            value = self._value(matrix, scale_values, run, origin)
            self._count(num_bytes(matrix, run, per_item))
            try:
                yield value
            finally:
                del value
                for span in read:
                    file.drop(span)

    def _scale(self, matrix: StoredTensor, tensor: StoredTensor, part: TensorPart) -> torch.Tensor:
        """A copy of its own: it is needed for as long as its matrix is read."""
        file = self._file(tensor.path)
        window = self._parts.scale_part(matrix, tensor, self._parts.window(part)).window
        read = list(touched(tensor, window))
        self._fetch(file, read)
        if part.is_whole and tensor.name in self._digests:
            digest = RunningDigest()
            digest.add(file.bytes_of(read[0]))
            self._require_digest(tensor, digest)
        value = file.view(tensor)[window.first_row : window.end_row]
        if not window.has_whole_rows:
            value = value[:, window.first_column : window.end_column]
        value = value.clone()
        for span in read:
            file.drop(span)
        require_sane(tensor, value)
        self._count(num_bytes(tensor, window), is_part=True)
        return value

    def _value(
        self,
        matrix: StoredTensor,
        scales: list[torch.Tensor],
        run: Window,
        origin: ScalePart | None,
    ) -> torch.Tensor:
        codes = self._file(matrix.path).view(matrix)[run.first_row : run.end_row]
        if not run.has_whole_rows:
            per_code = self._parts.values_per_item(matrix)
            codes = codes[:, run.first_column // per_code : run.end_column // per_code]
        if origin is None:
            return codes
        # Where the codes are, seen from where the scales begin.
        row, column = run.first_row - origin.first_row, run.first_column - origin.first_column
        return dequantize(self._parts.storage(matrix), codes, scales, row, column)

    def _fetch(self, file: MappedFile, read: list[Span]) -> None:
        with self._meter:
            for span in read:
                file.fetch(span)

    def _file(self, path: Path) -> MappedFile:
        with self._lock:
            if path not in self._files:
                self._files[path] = MappedFile(path)
            return self._files[path]

    def _count(self, num_bytes: int, *, is_part: bool = False) -> None:
        """Something was read; where it is only a part of what makes a piece, nobody is told yet."""
        self._meter.add(num_bytes)
        if self._ahead is not None:
            self._ahead.used(num_bytes)
        with self._lock:
            self._num_done += num_bytes
            if self._on_progress is not None and not is_part:
                self._on_progress(self._num_done, self.num_wanted_bytes)

    def _require_digest(self, tensor: StoredTensor, found: RunningDigest) -> None:
        if found.hexdigest() != self._digests[tensor.name]:
            raise CheckpointError(
                f"tensor {tensor.name} in {tensor.path} is damaged: its bytes do not match the checkpoint's digest",
                metadata={"tensor": tensor.name},
            )

    def _drop_last(self) -> None:
        if self._last is not None:
            self._last.close()
            self._last = None
