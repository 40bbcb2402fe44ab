"""Numbers of the host on an engine's device. Knows no requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def ints(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64, on its way while the host goes on."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
