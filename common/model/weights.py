"""Tensors of a checkpoint as modules ask for them: by official name and expected shape. Knows no file format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from common.errors import CheckpointError


@runtime_checkable
class PartSource(Protocol):
    """A source of tensors that can read a part of a matrix without reading the rest of it."""

    def part(self, name: str, rows: slice | None, columns: slice | None) -> torch.Tensor:
        """The chosen rows and columns of a tensor that is there."""
        ...


class Weights:
    """A view on named tensors that checks shapes and casts, and remembers what was asked for.

    Matrices come in `dtype`; everything that official code keeps in float32 is asked for with `floats`. Shapes are those
    of the whole tensor; `rows` and `columns` choose what this rank keeps of it. What is handed out is the caller's own.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        prefix: str = "",
        taken: set[str] | None = None,
    ) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._device = device
        self._prefix = prefix
        self.taken: set[str] = set() if taken is None else taken

    def under(self, prefix: str) -> Weights:
        """The same tensors below a dotted prefix."""
        return Weights(
            self._tensors,
            dtype=self._dtype,
            device=self._device,
            prefix=f"{self._prefix}{prefix}.",
            taken=self.taken,
        )

    def has(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def matrix(
        self,
        name: str,
        *shape: int,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> torch.Tensor:
        return self._take(name, shape, self._dtype, rows, columns)

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

    def fill(self, room: torch.Tensor, name: str, *shape: int, is_transposed: bool = False) -> None:
        """Copy a matrix, or its transpose, into room such as a part of `empty_matrices`, with no copy in between."""
        tensor = self._find(self._prefix + name, shape, None, None)
        # Torch is quick to transpose from a contiguous matrix of the same type into a contiguous one.
        room.copy_(tensor.to(room.dtype).T if is_transposed else tensor)
        self.taken.add(self._prefix + name)

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
        full_name = self._prefix + name
        tensor = self._find(full_name, shape, rows, columns)
        self.taken.add(full_name)
        # A copy even where nothing is cast: a view would keep the file mapped and show what becomes of it.
        return tensor.to(
            device=self._device, dtype=dtype, copy=True, memory_format=torch.contiguous_format
        )

    def _find(
        self,
        full_name: str,
        shape: tuple[int, ...],
        rows: slice | None,
        columns: slice | None,
    ) -> torch.Tensor:
        whole = (slice(0, shape[0]), *(slice(0, size) for size in shape[1:]))
        chosen = (rows or whole[0], *(columns or part for part in whole[1:2]), *whole[2:])
        expected = [
            len(range(*part.indices(size))) for part, size in zip(chosen, shape, strict=True)
        ]
        is_part = chosen != whole
        if is_part and isinstance(self._tensors, PartSource) and full_name in self._tensors:
            tensor = self._tensors.part(full_name, rows, columns)
        else:
            found = self._tensors.get(full_name)
            if found is None:
                raise CheckpointError(
                    f"the checkpoint lacks tensor {full_name}", metadata={"tensor": full_name}
                )
            _require_shape(full_name, found, list(shape))
            tensor = found[chosen] if is_part else found
        _require_shape(full_name, tensor, expected)
        return tensor


def _require_shape(name: str, tensor: torch.Tensor, expected: list[int]) -> None:
    if list(tensor.shape) != expected:
        raise CheckpointError(
            f"tensor {name} has shape {list(tensor.shape)}; the configuration asks for {expected}",
            metadata={"tensor": name},
        )
