"""A matrix whose groups of rows have inputs of their own. Knows shapes.

Letters: G groups, N rows, K columns, R rows of the matrix per group.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from common.model.matrices import DenseMatrix, Matrix


class GroupedMatrix(Protocol):
    """`[G * R, K]`, of which every group of R rows multiplies another input."""

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, G, K]` to `[N, G * R]`."""
        ...


def grouped(matrix: Matrix, rows_each: int) -> GroupedMatrix:
    """The matrix in groups of so many rows; the way it is held stays."""
    if isinstance(matrix, DenseMatrix):
        return DenseGroups(matrix.values(), rows_each)
    return StoredGroups(matrix, rows_each)


class DenseGroups:
    """Values, laid out once as one product of all groups wants them."""

    def __init__(self, values: torch.Tensor, rows_each: int) -> None:
        by_group = values.view(-1, rows_each, values.shape[1])
        self._columns_first = by_group.transpose(1, 2).contiguous()  # [G, K, R]

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.transpose(0, 1), self._columns_first).transpose(0, 1).flatten(1)


class StoredGroups:
    """Values of a group at a time exist: as in published inference, groups are never multiplied as codes."""

    def __init__(self, matrix: Matrix, rows_each: int) -> None:
        self._matrix = matrix
        self._rows_each = rows_each

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        products = [
            F.linear(
                rows, self._matrix.values(slice(g * self._rows_each, (g + 1) * self._rows_each))
            )
            for g, rows in enumerate(x.unbind(1))
        ]
        return torch.cat(products, dim=-1)
