"""What the drafter's confidence is worth. Knows logits and temperatures; the head that makes them is the model's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from common.errors import CheckpointError

TEMPERATURES_FILE = "confidence_temperatures.json"


def calibrate(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Probability [R, G] that a draft is accepted given that those before it are, from confidence logits [R, G].

    `temperatures` [G] divide the logits of each draft position.
    """
    return (logits / temperatures).sigmoid_()


def survival(confidences: Tensor) -> Tensor:
    """Probability [R, G] that a draft and all before it are accepted."""
    return confidences.cumprod(-1)


def load_temperatures(
    checkpoint: Path, num_draft: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The first `num_draft` calibration temperatures [G] float32 of a checkpoint directory.

    A checkpoint without the file is uncalibrated: all ones. Raises CheckpointError where the file does not hold a
    positive temperature for every draft position.
    """
    path = checkpoint / TEMPERATURES_FILE
    if not path.exists():
        return torch.ones(num_draft, device=device)
    try:
        temperatures = json.loads(path.read_text())["temperatures"]
        values = [float(value) for value in temperatures]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f'{path} must hold {{"temperatures": [number, …]}}: {error!r}'
        ) from error
    if len(values) < num_draft:
        raise CheckpointError(
            f"{path} has {len(values)} temperatures; a draft length of {num_draft} needs as many"
        )
    for position, value in enumerate(values[:num_draft]):
        if not (math.isfinite(value) and value > 0.0):
            raise CheckpointError(f"{path}: temperature {position} is {value}; give a positive one")
    return torch.tensor(values[:num_draft], dtype=torch.float32, device=device)
