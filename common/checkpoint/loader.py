"""From a checkpoint folder to a model that runs."""

from __future__ import annotations

from pathlib import Path

import torch

from common.checkpoint.reader import CheckpointReader, Progress
from common.errors import CheckpointError
from common.model.config import ModelConfig
from common.model.dspark import DSparkModel, build_model


def load_model(
    checkpoint_dir: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress | None = None,
) -> DSparkModel:
    """Load configuration and weights. Raises CheckpointError that names the file, key or tensor that is wrong."""
    if not checkpoint_dir.is_dir():
        raise CheckpointError(f"no checkpoint folder at {checkpoint_dir}")
    config = ModelConfig.load(checkpoint_dir)
    with CheckpointReader(checkpoint_dir, on_progress) as reader:
        return build_model(config, reader, dtype=dtype, device=device)
