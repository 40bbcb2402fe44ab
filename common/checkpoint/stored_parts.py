"""From parts of tensors, by official name, to bytes of files. Knows headers; reads nothing and needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from common.checkpoint.formats import stored_as
from common.checkpoint.headers import Headers, StoredTensor
from common.checkpoint.names import official_names
from common.checkpoint.scales import ScalePart, scale_part
from common.checkpoint.spans import Span, Window, num_bytes, spans, touched, window_of
from common.checkpoint.storage import Storage, scale_names
from common.errors import CheckpointError


class Part(Protocol):
    """What is wanted of a tensor; None stands for all rows or columns."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> slice | None: ...
    @property
    def columns(self) -> slice | None: ...


class StoredParts:
    """Where the parts of a checkpoint's tensors are."""

    def __init__(self, headers: Headers) -> None:
        self._headers = headers
        self._storages: dict[str, Storage] = {}
        self.names = official_names(headers)
        """Official name to the stored one; scales are left out."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor's values."""
        matrix = self.stored(name)
        if self.storage(matrix) is Storage.FP4:
            return matrix.shape[0], matrix.shape[1] * 2
        return matrix.shape

    def stored(self, name: str) -> StoredTensor:
        """The tensor of this official name, without scales."""
        return self._headers[self.names[name]]

    def window(self, part: Part) -> Window:
        return window_of(self.shape(part.name), part.rows, part.columns)

    def storage(self, matrix: StoredTensor) -> Storage:
        found = self._storages.get(matrix.name)
        if found is None:
            found = self._storages[matrix.name] = stored_as(self._headers, matrix.name)
        return found

    def values_per_item(self, matrix: StoredTensor) -> int:
        return 2 if self.storage(matrix) is Storage.FP4 else 1

    def tensors(self, name: str) -> list[StoredTensor]:
        """A matrix and its scales. Raises CheckpointError when it has none and cannot be read without them."""
        own_name = self.names[name]
        matrix = self._headers[own_name]
        names = scale_names(self.storage(matrix), own_name)
        for scale in names:
            if scale not in self._headers:
                raise CheckpointError(
                    f"the checkpoint lacks tensor {scale}", metadata={"tensor": scale}
                )
        return [matrix, *(self._headers[scale] for scale in names)]

    def scale_part(self, matrix: StoredTensor, scale: StoredTensor, window: Window) -> ScalePart:
        return scale_part(self.storage(matrix), scale.shape, window)

    def spans(self, part: Part) -> Iterator[tuple[Path, Span]]:
        """All bytes of a part in the order in which they are read: scales first."""
        for tensor, window, per_item in self._windows(part):
            for span in spans(tensor, window, per_item):
                yield tensor.path, span

    def touched(self, part: Part) -> Iterator[tuple[Path, Span]]:
        """The same by pages."""
        for tensor, window, per_item in self._windows(part):
            for span in touched(tensor, window, per_item):
                yield tensor.path, span

    def num_bytes(self, part: Part) -> int:
        """How many they are."""
        return sum(num_bytes(*window) for window in self._windows(part))

    def _windows(self, part: Part) -> Iterator[tuple[StoredTensor, Window, int]]:
        """Of each tensor, with its values per item."""
        matrix, *scales = self.tensors(part.name)
        window = self.window(part)
        for scale in scales:
            yield scale, self.scale_part(matrix, scale, window).window, 1
        yield matrix, window, self.values_per_item(matrix)
