"""Weights side by side in one tensor, and matrices that make one product. Knows shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.model.matrices import EVERY, DenseMatrix, Matrix


def joined(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """`torch.cat` for weights. On the meta device, where models are rehearsed, that one imports torch's whole compiler."""
    first = parts[0]
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    room = first.new_empty(shape)
    begin = 0
    for part in parts:
        room.narrow(dim, begin, part.shape[dim]).copy_(part)
        begin += part.shape[dim]
    return room


def joined_matrix(parts: Sequence[Matrix]) -> Matrix:
    """Rows of all, one part under the other: copied into one matrix where all are values, else each as it is held."""
    if all(isinstance(part, DenseMatrix) for part in parts):
        return DenseMatrix(joined([part.values() for part in parts]))
    return JoinedMatrix(parts)


class JoinedMatrix:
    """Parts that are multiplied one by one."""

    def __init__(self, parts: Sequence[Matrix]) -> None:
        self._parts = tuple(parts)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for part in self._parts for tensor in part.tensors)

    def values(self, rows: slice = EVERY) -> torch.Tensor:
        return joined([part.values() for part in self._parts])[rows]

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.linear(x) for part in self._parts], dim=-1)
