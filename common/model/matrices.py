"""Matrices that a model multiplies with, however they are held. Knows products; no storage formats."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

EVERY = slice(None)


@runtime_checkable
class Matrix(Protocol):
    """`[rows, columns]`, as weights of a linear layer are."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What it holds."""
        ...

    def values(self, rows: slice = EVERY) -> torch.Tensor:
        """Those of some rows; where they are not what is held, the caller should soon let go of them."""
        ...

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, columns]` to `[N, rows]`."""
        ...


class DenseMatrix:
    """Held as values."""

    def __init__(self, values: torch.Tensor) -> None:
        self.tensors = (values,)

    def values(self, rows: slice = EVERY) -> torch.Tensor:
        return self.tensors[0][rows]

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.tensors[0])
