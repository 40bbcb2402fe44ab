"""Which bytes of a file a part of a matrix is. Arithmetic only; reads nothing and needs no torch."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

from common.checkpoint.headers import ITEM_BYTES, StoredTensor


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file."""

    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Rows and columns of a matrix, as its values count them."""

    first_row: int
    end_row: int
    first_column: int
    end_column: int
    num_columns: int
    """Of the whole matrix; 1 where there is only a list."""

    @property
    def num_rows(self) -> int:
        return self.end_row - self.first_row

    @property
    def num_columns_taken(self) -> int:
        return self.end_column - self.first_column

    @property
    def num_values(self) -> int:
        return self.num_rows * self.num_columns_taken

    @property
    def has_whole_rows(self) -> bool:
        return (self.first_column, self.end_column) == (0, self.num_columns)

    def runs(self, largest: int) -> Iterator[Window]:
        """The same in runs of rows of at most `largest` values, but at least a row."""
        step = max(1, largest // max(1, self.num_columns_taken))
        for row in range(self.first_row, self.end_row, step):
            yield Window(
                first_row=row,
                end_row=min(row + step, self.end_row),
                first_column=self.first_column,
                end_column=self.end_column,
                num_columns=self.num_columns,
            )


def window_of(shape: tuple[int, ...], rows: slice | None, columns: slice | None) -> Window:
    """A part of a matrix, or of a list."""
    num_rows, num_columns = (*shape, 1, 1)[:2]
    first_row, end_row, _ = (rows or slice(None)).indices(num_rows)
    first_column, end_column, _ = (columns or slice(None)).indices(num_columns)
    return Window(
        first_row=first_row,
        end_row=max(first_row, end_row),
        first_column=first_column,
        end_column=max(first_column, end_column),
        num_columns=num_columns,
    )


def spans(tensor: StoredTensor, window: Window, values_per_item: int = 1) -> Iterator[Span]:
    """Where the window is in a stored matrix: one span where rows are whole, else one for every row."""
    item_bytes = ITEM_BYTES[tensor.dtype]

    def bytes_of(num_values: int) -> int:
        return num_values // values_per_item * item_bytes

    row_bytes = bytes_of(window.num_columns)
    if window.has_whole_rows:
        yield Span(
            tensor.begin + window.first_row * row_bytes, tensor.begin + window.end_row * row_bytes
        )
        return
    for row in range(window.first_row, window.end_row):
        start = tensor.begin + row * row_bytes
        yield Span(start + bytes_of(window.first_column), start + bytes_of(window.end_column))


def touched(tensor: StoredTensor, window: Window, values_per_item: int = 1) -> Iterator[Span]:
    """The same by pages: parts of short rows share theirs, so that all between them is read as well."""
    exact = spans(tensor, window, values_per_item)
    if window.has_whole_rows or window.num_rows < 2:
        yield from exact
        return
    first, second = next(exact), next(exact)
    if second.begin - first.end < mmap.PAGESIZE:
        row_bytes = second.begin - first.begin
        yield Span(first.begin, first.end + (window.num_rows - 1) * row_bytes)
        return
    yield first
    yield second
    yield from exact


def num_bytes(tensor: StoredTensor, window: Window, values_per_item: int = 1) -> int:
    """How many the window has."""
    return window.num_values // values_per_item * ITEM_BYTES[tensor.dtype]
