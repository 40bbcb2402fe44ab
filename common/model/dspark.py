"""Target and drafter as one served model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from common.model.config import ModelConfig
from common.model.drafter import Drafter
from common.model.kernels import select_kernels
from common.model.target import Target
from common.model.weights import Weights


@dataclass(frozen=True, slots=True)
class DSparkModel:
    """A model ready to run; `drafter` is None when the checkpoint has none."""

    config: ModelConfig
    target: Target
    drafter: Drafter | None
    dtype: torch.dtype
    device: torch.device


def build_model(
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> DSparkModel:
    """Take every tensor that the model needs from `tensors`. Raises CheckpointError that names what does not fit."""
    weights = Weights(tensors, dtype=dtype, device=device)
    kernels = select_kernels(device, dtype)
    target = Target(config, weights, kernels, device)
    drafter = None
    if config.has_drafter:
        drafter = Drafter(config, weights, kernels, device, embed=target.embed, head=target.head)
    return DSparkModel(config, target, drafter, dtype, device)
