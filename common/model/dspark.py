"""Target and drafter as one served model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from common.device.staging import Staging
from common.model.config import ModelConfig
from common.model.divisible import divisible
from common.model.drafter import Drafter
from common.model.kernels import select_kernels, select_products
from common.model.quantization import Quantization
from common.model.target import Target
from common.model.weights import Weights
from common.parallel.collectives import Communicator
from common.parallel.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class DSparkModel:
    """A model ready to run, or one rank's parts of it; `drafter` is None when the checkpoint has none."""

    config: ModelConfig
    target: Target
    drafter: Drafter | None
    dtype: torch.dtype
    device: torch.device
    comm: Communicator

    @property
    def num_heads(self) -> int:
        """Attention heads of this rank."""
        return self.config.num_attention_heads // self.comm.shard.mesh.tp

    @property
    def vocabulary(self) -> Vocabulary:
        """How the logits' vocabulary is spread."""
        size = self.config.vocab_size
        return Vocabulary(size=size, part=self.comm.shard.vocabulary_part(size), axis=self.comm.tp)


def build_model(
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    comm: Communicator | None = None,
    staging: Staging | None = None,
    quantization: Quantization = Quantization.DEQUANTIZE,
) -> DSparkModel:
    """Take what the model needs from `tensors`, or what the rank of `comm` needs of it.

    `staging` is the way to the device; a CPU needs none. `quantization` is for matrices that `tensors` has quantised.
    Raises CheckpointError that names what does not fit, ConfigError when the mesh does not divide the model.
    """
    comm = comm or Communicator()
    divisible(config).require_divided_by(comm.shard.mesh)
    weights = Weights(
        tensors,
        dtype=dtype,
        device=device,
        staging=staging,
        keeps_stored=quantization.keeps_stored,
        products=select_products(device) if quantization is Quantization.W8A8 else None,
    )
    kernels = select_kernels(device, dtype)
    target = Target(config, weights, kernels, device, comm)
    drafter = None
    if config.has_drafter:
        embed, head = _drafter_vocabulary(config, weights, target, comm)
        drafter = Drafter(config, weights, kernels, device, comm, embed=embed, head=head)
    return DSparkModel(config, target, drafter, dtype, device, comm)


def _drafter_vocabulary(
    config: ModelConfig, weights: Weights, target: Target, comm: Communicator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and head of the drafter: the target's, unless a checkpoint with rotated hidden states brings others."""
    shape = (config.vocab_size, config.hidden_size)
    first, last = weights.under("mtp.0"), weights.under(f"mtp.{config.num_drafter_layers - 1}")
    embed = first.matrix("embed.weight", *shape) if first.has("embed.weight") else target.embed
    part = comm.shard.vocabulary_part(config.vocab_size)
    has_head = last.has("head.weight")
    head = last.floats("head.weight", *shape, rows=part) if has_head else target.head
    return embed, head
