"""Slow twins of the quantised storages: quantise and dequantise a whole checkpoint with torch's own casts."""

from __future__ import annotations

import torch

from common.checkpoint.formats import CheckpointFormat, storages
from common.checkpoint.quantize import quantize_fp4, quantize_fp8, quantize_int8
from common.checkpoint.storage import Storage
from common.checkpoint.tensors import model_tensors
from common.model.config import ModelConfig
from tests.support.tiny_checkpoint import Tensors

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def through(checkpoint_format: CheckpointFormat, config: ModelConfig, tensors: Tensors) -> Tensors:
    """What a checkpoint is worth after it was written in a format."""
    found = {}
    for tensor in model_tensors(config):
        if tensor.name in tensors:
            storage = storages(checkpoint_format, tensor)[0]
            found[tensor.name] = _through(storage, tensors[tensor.name])
    return found


def _through(storage: Storage, values: torch.Tensor) -> torch.Tensor:
    match storage:
        case Storage.PLAIN:
            return values
        case Storage.FP8:
            codes, scale = quantize_fp8(values)
            wide = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            return codes.float() * wide[: values.shape[0], : values.shape[1]]
        case Storage.FP4:
            codes, scale = quantize_fp4(values)
            nibbles = torch.stack((codes & 15, codes >> 4 & 15), dim=-1).flatten(1).long()
            signs = 1.0 - 2.0 * (nibbles >> 3)
            return signs * FP4[nibbles & 7] * scale.float().repeat_interleave(32, 1)
        case Storage.INT8 | Storage.INT8_OFFSET:
            codes, scale = quantize_int8(values)
            return codes.float() * scale[:, None]
