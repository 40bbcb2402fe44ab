"""Scales that no quantiser writes. A smaller error looks like any other scale: see `digests`."""

from __future__ import annotations

import torch

from common.checkpoint.headers import StoredTensor
from common.errors import CheckpointError

LARGEST_SCALE = 2.0**20
"""No published weight comes near it; what is above is a damaged scale."""


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
