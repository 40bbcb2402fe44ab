"""Matrices that stay in memory as a checkpoint stores them. Knows storages and arithmetic; reads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from common.checkpoint.dequantize import dequantize
from common.checkpoint.scales import ScalePart
from common.checkpoint.spans import Window
from common.checkpoint.storage import Storage
from common.device.staging import Staging


class HeldMatrix:
    """Codes and scales; values exist while a product is computed.

    A product is that with the values which loading would have given. Taking the values of one expert at a time costs
    little memory, and reading a half or a quarter of the bytes is what makes small batches faster.
    """

    def __init__(
        self,
        storage: Storage,
        codes: torch.Tensor,
        scales: tuple[torch.Tensor, ...],
        *,
        first_row: int,
        first_column: int,
        dtype: torch.dtype,
    ) -> None:
        """The codes' place is counted from where the scales begin; products are computed in `dtype`."""
        self.tensors = (codes, *scales)
        self._storage = storage
        self._place = (first_row, first_column)
        self._dtype = dtype

    def values(self) -> torch.Tensor:
        codes, *scales = self.tensors
        return dequantize(self._storage, codes, scales, *self._place).to(self._dtype)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.values())


def hold(
    storage: Storage,
    window: Window,
    pieces: Iterable[torch.Tensor],
    scales: Sequence[torch.Tensor],
    place: ScalePart,
    *,
    codes: torch.Tensor,
    dtype: torch.dtype,
    staging: Staging,
) -> HeldMatrix:
    """Fill `codes` with the pieces of a window, whose scales are those of `place`."""
    # As bytes, which every device can copy.
    room, begin = codes.view(torch.uint8), 0
    for piece in pieces:
        end = begin + piece.shape[0]
        staging.copy(piece.view(torch.uint8), room[begin:end])
        begin = end
    return HeldMatrix(
        storage,
        codes,
        tuple(scales),
        first_row=window.first_row - place.first_row,
        first_column=window.first_column - place.first_column,
        dtype=dtype,
    )
