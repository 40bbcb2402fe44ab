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
        embed, head = _drafter_vocabulary(config, weights, target)
        drafter = Drafter(config, weights, kernels, device, embed=embed, head=head)
    return DSparkModel(config, target, drafter, dtype, device)


def _drafter_vocabulary(
    config: ModelConfig, weights: Weights, target: Target
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and head of the drafter: the target's, unless a checkpoint with rotated hidden states brings others."""
    shape = (config.vocab_size, config.hidden_size)
    first, last = weights.under("mtp.0"), weights.under(f"mtp.{config.num_drafter_layers - 1}")
    embed = first.matrix("embed.weight", *shape) if first.has("embed.weight") else target.embed
    head = last.floats("head.weight", *shape) if last.has("head.weight") else target.head
    return embed, head
