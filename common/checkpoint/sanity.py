"""What no quantiser writes. A smaller error looks like any other value: see `digests`."""

from __future__ import annotations

import torch

from common.checkpoint.headers import StoredTensor
from common.errors import CheckpointError

LARGEST_SCALE = 2.0**20
"""No published weight comes near it; what is above is a damaged scale."""


LOOKED_AT_FIRST = 4096
"""Bytes of a tensor that nearly always have one that is not zero."""


def require_written(tensor: StoredTensor, content: memoryview) -> None:
    """Raise CheckpointError that names the tensor when all its bytes are zero, as where a download has not come yet.

    Holds for matrices and their scales; offsets, biases and other lists may be zero.
    """
    if not len(content) or any(content[:LOOKED_AT_FIRST]):
        return
    if not torch.frombuffer(content, dtype=torch.uint8).any():
        raise CheckpointError(
            f"tensor {tensor.name} in {tensor.path} is nothing but zeros, as in a download that has not finished",
            metadata={"tensor": tensor.name},
        )


def require_sane(tensor: StoredTensor, scale: torch.Tensor) -> None:
    """Raise CheckpointError that names the tensor when values of a scale or an offset cannot be right."""
    values = scale.float()
    if tensor.name.endswith("offset"):
        is_sane = bool(values.isfinite().all())
    else:
        # NaN fails both comparisons.
        is_sane = bool(((values >= 0) & (values <= LARGEST_SCALE)).all())
    if not is_sane:
        raise CheckpointError(
            f"tensor {tensor.name} has scales that are not numbers or beyond {LARGEST_SCALE:.0f}; the file is damaged",
            metadata={"tensor": tensor.name},
        )
