"""Matrices that stay in memory as a checkpoint stores them. Knows storages and arithmetic; reads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from common.checkpoint.dequantize import dequantize, e8m0_to_float
from common.checkpoint.scales import ScalePart
from common.checkpoint.spans import Window
from common.checkpoint.storage import Storage
from common.device.staging import Staging
from common.model.kernels import EightBitProducts
from common.model.kernels.eight_bits import fp8_rounded
from common.model.matrices import EVERY


class HeldMatrix:
    """Codes and scales; values of a run of rows at a time exist, while a product is computed.

    A product is that with the values which loading would have given.
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

    def values(self, rows: slice = EVERY) -> torch.Tensor:
        codes, *scales = self.tensors
        first_row, first_column = self._place
        first_row += rows.indices(codes.shape[0])[0]
        values = dequantize(self._storage, codes[rows], scales, first_row, first_column)
        return values.to(self._dtype)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = self.tensors[0].shape[0]
        step = max(1, _piece_values(x.device) // max(1, x.shape[-1]))
        pieces = [
            F.linear(x, self.values(slice(row, row + step))) for row in range(0, num_rows, step)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


class EightBitMatrix(HeldMatrix):
    """Codes of 8 bits that multiply activations of 8 bits."""

    def __init__(
        self,
        storage: Storage,
        codes: torch.Tensor,
        scales: tuple[torch.Tensor, ...],
        products: EightBitProducts,
        *,
        first_row: int,
        first_column: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(
            storage, codes, scales, first_row=first_row, first_column=first_column, dtype=dtype
        )
        self._products = products

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = self.tensors[:2]
        if not x.shape[0]:
            # Not every device's products take nothing.
            return x.new_empty(0, codes.shape[0])
        if self._storage is Storage.FP8:
            return self._fp8_linear(x, codes, scale)
        # Scales by row begin where the codes do.
        return self._products.int8_linear(x, codes, scale.view(-1))

    def _fp8_linear(
        self, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        begins_with_a_block = self._place == (0, 0)
        if begins_with_a_block:
            product = self._products.fp8_linear(x, codes, e8m0_to_float(scale))
            if product is not None:
                return product
        return super().linear(fp8_rounded(x))


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
    products: EightBitProducts | None,
) -> HeldMatrix:
    """Fill `codes` with the pieces of a window, whose scales are those of `place`; multiply by `products` where they can.

    Pieces and `scales` are in host memory; both reach the device of `codes` by way of `staging`.
    """
    # As bytes, which every device can copy.
    room, begin = codes.view(torch.uint8), 0
    for piece in pieces:
        end = begin + piece.shape[0]
        staging.copy(piece.view(torch.uint8), room[begin:end])
        begin = end
    is_symmetric = _is_symmetric_8_bits(storage, scales)
    on_device = tuple(_moved(scale, codes.device, staging) for scale in scales)
    first_row = window.first_row - place.first_row
    first_column = window.first_column - place.first_column
    if products is not None and is_symmetric:
        return EightBitMatrix(
            storage,
            codes,
            on_device,
            products,
            first_row=first_row,
            first_column=first_column,
            dtype=dtype,
        )
    return HeldMatrix(
        storage,
        codes,
        on_device,
        first_row=first_row,
        first_column=first_column,
        dtype=dtype,
    )


def _piece_values(device: torch.device) -> int:
    """Values that exist at once: on a CPU what stays in its cache, elsewhere enough for a device to be busy with."""
    return 1 << 20 if device.type == "cpu" else 1 << 24


def _moved(scale: torch.Tensor, device: torch.device, staging: Staging) -> torch.Tensor:
    room = torch.empty_like(scale, device=device)
    staging.copy(scale.view(torch.uint8), room.view(torch.uint8))
    return room


def _is_symmetric_8_bits(storage: Storage, scales: Sequence[torch.Tensor]) -> bool:
    match storage:
        case Storage.FP8 | Storage.INT8:
            return True
        case Storage.INT8_OFFSET:
            # Published offsets are zero; with others the sums would be of other products.
            return not bool(scales[1].any())
        case _:
            return False
