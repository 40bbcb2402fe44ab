"""Tensors of a checkpoint as modules ask for them: by official name and expected shape. Knows no file format."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from common.device.cpu import CpuBackend
from common.device.staging import Staging
from common.errors import CheckpointError
from common.model.kernels import EightBitProducts
from common.model.matrices import DenseMatrix, Matrix


@dataclass(frozen=True, slots=True)
class TensorPart:
    """What is wanted of a tensor; None stands for all rows or columns."""

    name: str
    rows: slice | None = None
    columns: slice | None = None

    @property
    def is_whole(self) -> bool:
        return self.rows is None and self.columns is None


@runtime_checkable
class PieceSource(Protocol):
    """A source of tensors that reads no more than what is asked for, and that piece by piece."""

    def read_into(self, part: TensorPart, room: torch.Tensor) -> bool:
        """Fill host memory with a part, with no copy in between; False, with nothing done, where values need work first."""
        ...

    def pieces(self, part: TensorPart) -> Iterator[torch.Tensor]:
        """Runs of a part's rows, in order; each is good until the next one is asked for. The tensor must be there."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        ...


@runtime_checkable
class StoredSource(Protocol):
    """A source that can give matrices as they are stored."""

    def is_quantised(self, name: str) -> bool:
        """Whether a tensor, which must be there, is stored as anything but values."""
        ...

    def held(
        self,
        part: TensorPart,
        *,
        dtype: torch.dtype,
        device: torch.device,
        staging: Staging,
        products: EightBitProducts | None,
    ) -> Matrix | None:
        """Codes and scales of a part, for products in `dtype`, or those of `products` where it has some for them.

        None when the part is stored as values.
        """
        ...


class Weights:
    """A view on named tensors that checks shapes and casts, and remembers what was asked for.

    Matrices come in `dtype`; everything that official code keeps in float32 is asked for with `floats`. Shapes are those
    of the whole tensor; `rows` and `columns` choose what this rank keeps of it. What is handed out is the caller's own.
    Values reach the device through `staging`; the default is for a CPU.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        staging: Staging | None = None,
        keeps_stored: bool = False,
        products: EightBitProducts | None = None,
    ) -> None:
        """With `keeps_stored`, quantised matrices stay as they are stored; `products` then multiplies those of 8 bits."""
        self._tensors = tensors
        self._source = tensors if isinstance(tensors, PieceSource) else None
        self._dtype = dtype
        self._device = device
        self._staging = staging or Staging(CpuBackend())
        self._keeps_stored = keeps_stored
        self._products = products
        self._prefix = ""
        self.taken: set[str] = set()
        """Shared with all that lie below."""

    def under(self, prefix: str) -> Weights:
        """The same tensors below a dotted prefix."""
        # Every expert has one: what it shares is not looked at again.
        below = copy.copy(self)
        below._prefix = f"{self._prefix}{prefix}."
        return below

    def has(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def stays_stored(self, name: str) -> bool:
        """Whether `held` gives a matrix as it is stored: that is wanted, and it is quantised."""
        if not self._keeps_stored or not isinstance(self._tensors, StoredSource):
            return False
        return self._tensors.is_quantised(self._prefix + name)

    def matrix(
        self,
        name: str,
        *shape: int,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> torch.Tensor:
        return self._take(name, shape, self._dtype, rows, columns)

    def held(
        self,
        name: str,
        *shape: int,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> Matrix:
        """A matrix for products: as it is stored where that is wanted and it is quantised, else as values."""
        full_name = self._prefix + name
        if self._keeps_stored and isinstance(self._tensors, StoredSource):
            part = TensorPart(
                full_name, _unless_whole(rows, shape, 0), _unless_whole(columns, shape, 1)
            )
            self._require(full_name, shape)
            held = self._tensors.held(
                part,
                dtype=self._dtype,
                device=self._device,
                staging=self._staging,
                products=self._products,
            )
            if held is not None:
                self.taken.add(full_name)
                return held
        return DenseMatrix(self.matrix(name, *shape, rows=rows, columns=columns))

    def floats(
        self,
        name: str,
        *shape: int,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> torch.Tensor:
        return self._take(name, shape, torch.float32, rows, columns)

    def integers(self, name: str, *shape: int) -> torch.Tensor:
        return self._take(name, shape, torch.int64, None, None)

    def fill(
        self,
        room: torch.Tensor,
        name: str,
        *shape: int,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> None:
        """Copy a matrix into room such as a part of `empty_matrices`, with no copy in between.

        It is there once `staging` has been waited for: until then the matrix may be read beside others.
        """
        self._staging.later(lambda: self._copy(name, shape, rows, columns, room))

    def empty_matrices(self, *shape: int) -> torch.Tensor:
        """Room for matrices that are to lie side by side, in their type and place."""
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _take(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rows: slice | None,
        columns: slice | None,
    ) -> torch.Tensor:
        # Room of its own even where nothing is cast: a view would keep the file mapped and show what becomes of it.
        room = torch.empty(_part_shape(shape, rows, columns), dtype=dtype, device=self._device)
        self._copy(name, shape, rows, columns, room)
        return room

    def _copy(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: slice | None,
        columns: slice | None,
        room: torch.Tensor,
    ) -> None:
        full_name = self._prefix + name
        part = TensorPart(
            full_name, _unless_whole(rows, shape, 0), _unless_whole(columns, shape, 1)
        )
        self._require(part.name, shape)
        if self._source is None or not self._source.read_into(part, room):
            begin = 0
            for piece in self._pieces(part):
                end = begin + piece.shape[0]
                self._staging.copy(piece, room[begin:end])
                begin = end
            assert begin == room.shape[0], f"{begin} rows of {full_name} for {room.shape[0]}"
        self.taken.add(full_name)

    def _require(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._tensors:
            raise CheckpointError(f"the checkpoint lacks tensor {name}", metadata={"tensor": name})
        source = self._source
        found = tuple(self._tensors[name].shape) if source is None else source.shape(name)
        if found != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(found)}; the configuration asks for {list(shape)}",
                metadata={"tensor": name},
            )

    def _pieces(self, part: TensorPart) -> Iterator[torch.Tensor]:
        if self._source is not None:
            yield from self._source.pieces(part)
            return
        whole = self._tensors[part.name]
        chosen = whole if part.rows is None else whole[part.rows]
        yield chosen if part.columns is None else chosen[:, part.columns]


def _part_shape(
    shape: tuple[int, ...], rows: slice | None, columns: slice | None
) -> tuple[int, ...]:
    chosen = (rows, columns)[: len(shape)]
    sizes = [
        size if part is None else len(range(*part.indices(size)))
        for size, part in zip(shape, chosen, strict=False)
    ]
    return (*sizes, *shape[len(sizes) :])


def _unless_whole(part: slice | None, shape: tuple[int, ...], dim: int) -> slice | None:
    """None for a slice that is all of its dimension."""
    if part is None or part.indices(shape[dim]) == (0, shape[dim], 1):
        return None
    return part
