"""From a checkpoint folder to a model that runs."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from common.checkpoint.contract import check_contract
from common.checkpoint.headers import read_headers
from common.checkpoint.reader import CheckpointReader, Progress, ReadOptions
from common.checkpoint.tensors import model_tensors
from common.errors import CheckpointError
from common.model.config import ModelConfig
from common.model.dspark import DSparkModel, build_model

logger = logging.getLogger(__name__)


def load_model(
    checkpoint_dir: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress | None = None,
    options: ReadOptions | None = None,
) -> DSparkModel:
    """Check the checkpoint against its configuration, then load what the model needs.

    Raises CheckpointError that names the file, key or tensors that are wrong, before a weight is read where the headers
    tell.
    """
    if not checkpoint_dir.is_dir():
        raise CheckpointError(f"no checkpoint folder at {checkpoint_dir}")
    config = ModelConfig.load(checkpoint_dir)
    headers = read_headers(checkpoint_dir)
    report = check_contract(config, headers)
    report.require_met(checkpoint_dir)
    if report.extra:
        logger.warning(
            "%s has %d tensors that nothing takes, such as %s",
            checkpoint_dir,
            len(report.extra),
            report.extra[0],
        )
    wanted = [t.name for t in model_tensors(config) if not t.is_optional or t.name in headers]
    with CheckpointReader(
        checkpoint_dir, on_progress, headers=headers, wanted=wanted, options=options
    ) as reader:
        return build_model(config, reader, dtype=dtype, device=device)
