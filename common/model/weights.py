"""Tensors of a checkpoint as modules ask for them: by official name and expected shape. Knows no file format."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from common.errors import CheckpointError


class Weights:
    """A view on named tensors that checks shapes and casts, and remembers what was asked for.

    Matrices come in `dtype`; everything that official code keeps in float32 is asked for with `floats`.
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

    def matrix(self, name: str, *shape: int) -> torch.Tensor:
        return self._take(name, shape, self._dtype)

    def floats(self, name: str, *shape: int) -> torch.Tensor:
        return self._take(name, shape, torch.float32)

    def integers(self, name: str, *shape: int) -> torch.Tensor:
        return self._take(name, shape, torch.int64)

    def _take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        full_name = self._prefix + name
        tensor = self._tensors.get(full_name)
        if tensor is None:
            raise CheckpointError(
                f"the checkpoint lacks tensor {full_name}", metadata={"tensor": full_name}
            )
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {full_name} has shape {list(tensor.shape)}; the configuration asks for {list(shape)}",
                metadata={"tensor": full_name},
            )
        self.taken.add(full_name)
        return tensor.to(device=self._device, dtype=dtype).contiguous()
