"""Matrices that a model multiplies with, however they are held. Knows products; no storage formats."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F


@runtime_checkable
class Matrix(Protocol):
    """`[rows, columns]`, as weights of a linear layer are."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What it holds."""
        ...

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, columns]` to `[N, rows]`."""
        ...


class DenseMatrix:
    """Held as values."""

    def __init__(self, values: torch.Tensor) -> None:
        self.tensors = (values,)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.tensors[0])
