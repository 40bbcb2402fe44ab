"""Parts of a checkpoint's tensors from its files: fetched, compared with digests, dequantised a piece at a time.

Knows files, storages and digests; neither what is wanted next nor how much of it is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import torch

from common.checkpoint import pages
from common.checkpoint.dequantize import dequantize
from common.checkpoint.digests import RunningDigest
from common.checkpoint.headers import StoredTensor
from common.checkpoint.mapped import TORCH_DTYPES, MappedFile
from common.checkpoint.meter import LoadMeter
from common.checkpoint.sanity import require_sane
from common.checkpoint.scales import ScalePart
from common.checkpoint.spans import Span, Window, num_bytes, spans, touched
from common.checkpoint.stored_parts import StoredParts
from common.errors import CheckpointError
from common.model.weights import TensorPart

OnRead = Callable[[int, bool], None]
"""Called with a number of bytes that were read, and whether they complete a piece."""


class PartReader:
    """Any thread may ask. Files are opened when they are first needed, and closed by `close`.

    `digests` are by stored name; time that goes into waiting for storage is told to `meter`.
    """

    def __init__(
        self, parts: StoredParts, *, digests: Mapping[str, str], meter: LoadMeter, on_read: OnRead
    ) -> None:
        self._parts = parts
        self._digests = digests
        self._meter = meter
        self._on_read = on_read
        self._files: dict[Path, MappedFile] = {}
        self._lock = threading.Lock()

    def file(self, path: Path) -> MappedFile:
        with self._lock:
            if path not in self._files:
                self._files[path] = MappedFile(path)
            return self._files[path]

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def read_into(self, part: TensorPart, room: torch.Tensor) -> bool:
        """Fill host memory with a part's values, with no copy in between.

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
                self.file(matrix.path).read(span, values)
            if part.is_whole and matrix.name in self._digests:
                digest = RunningDigest()
                digest.add(values)
                self._require_digest(matrix, digest)
        self._on_read(span.num_bytes, True)
        return True

    def pieces(
        self, part: TensorPart, *, largest: int | None, as_codes: bool = False
    ) -> Generator[torch.Tensor]:
        """Runs of a part's rows, in order, of at most `largest` values; as values, or as the codes that are stored.

        Only pages that hold them are read. The caller must take all pieces or close the generator.
        """
        matrix, *scales = self._parts.tensors(part.name)
        window = self._parts.window(part)
        digest = RunningDigest() if part.is_whole and matrix.name in self._digests else None
        has_values = as_codes or not scales
        scale_values = [] if has_values else self.scales(part)
        origin = None if has_values else self._parts.scale_part(matrix, scales[0], window)
        file, per_item = self.file(matrix.path), self._parts.values_per_item(matrix)
        for run in window.runs(largest or max(1, window.num_values)):
            read = list(touched(matrix, run, per_item))
            self._fetch(file, read)
            if digest is not None:
                digest.add(file.bytes_of(read[0]))
                if run.end_row == window.end_row:
                    self._require_digest(matrix, digest)
            value = self._value(matrix, scale_values, run, origin)
            self._on_read(num_bytes(matrix, run, per_item), True)
            try:
                yield value
            finally:
                del value
                for span in read:
                    file.drop(span)

    def scales(self, part: TensorPart) -> list[torch.Tensor]:
        """Copies of what a part's codes need of the scales, compared with their digests whatever the part is."""
        matrix, *scales = self._parts.tensors(part.name)
        window = self._parts.window(part)
        return [
            self._scale(scale, self._parts.scale_part(matrix, scale, window).window)
            for scale in scales
        ]

    def _scale(self, tensor: StoredTensor, window: Window) -> torch.Tensor:
        file = self.file(tensor.path)
        has_digest = tensor.name in self._digests
        # Scales are small: a rank that needs some of them can afford to read them all, and then knows that they are right.
        read = [Span(tensor.begin, tensor.end)] if has_digest else list(touched(tensor, window))
        self._fetch(file, read)
        if has_digest:
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
        self._on_read(num_bytes(tensor, window), False)
        return value

    def _value(
        self,
        matrix: StoredTensor,
        scales: list[torch.Tensor],
        run: Window,
        origin: ScalePart | None,
    ) -> torch.Tensor:
        codes = self.file(matrix.path).view(matrix)[run.first_row : run.end_row]
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

    def _require_digest(self, tensor: StoredTensor, found: RunningDigest) -> None:
        if found.hexdigest() != self._digests[tensor.name]:
            raise CheckpointError(
                f"tensor {tensor.name} in {tensor.path} is damaged: its bytes do not match the checkpoint's digest",
                metadata={"tensor": tensor.name},
            )
