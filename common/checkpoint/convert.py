"""Writes a checkpoint in another format, a shard at a time. Knows formats and files; the arithmetic is elsewhere."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.checkpoint.contract import check_contract, stored_name
from common.checkpoint.digests import FILE_NAME as DIGESTS
from common.checkpoint.digests import digest, save_digests
from common.checkpoint.formats import CheckpointFormat, storages
from common.checkpoint.headers import ITEM_BYTES, read_headers
from common.checkpoint.mapped import TORCH_DTYPES
from common.checkpoint.model_tensor import ModelTensor
from common.checkpoint.quantize import quantize_fp4, quantize_fp8, quantize_int8
from common.checkpoint.read_options import Progress
from common.checkpoint.reader import CheckpointReader
from common.checkpoint.storage import FP4_GROUP, Part, Storage, parts
from common.checkpoint.tensors import model_tensors
from common.errors import CheckpointError
from common.model.config import ModelConfig
from common.model.weights import TensorPart

SHARD_BYTES = 4 << 30

Shard = list[tuple[ModelTensor, Storage]]


def convert_checkpoint(
    source_dir: Path,
    target_dir: Path,
    to: CheckpointFormat,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_progress: Progress | None = None,
) -> None:
    """Write what the model at `source_dir` consists of to the new folder `target_dir`, with digests.

    At most one shard is in memory. What no model takes, such as a classic MTP layer, is left out. A conversion that
    fails leaves a folder `<target>.partial` and no `target_dir`. Raises CheckpointError when the source does not keep
    its contract, a matrix does not fit the format or the target exists.
    """
    if target_dir.exists():
        raise CheckpointError(f"{target_dir} exists; give a folder that does not")
    config, headers = ModelConfig.load(source_dir), read_headers(source_dir)
    check_contract(config, headers).require_met(source_dir)
    tensors = [
        tensor
        for tensor in model_tensors(config)
        if not tensor.is_optional or stored_name(tensor.name, headers) in headers
    ]
    shards = list(_shards(tensors, to, shard_bytes))
    partial = target_dir.with_name(f"{target_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    digests: dict[str, str] = {}
    wanted = [TensorPart(tensor.name) for tensor in tensors]
    with CheckpointReader(source_dir, on_progress, headers=headers, wanted=wanted) as reader:
        for number, shard in enumerate(shards, 1):
            file_name = _file_name(to, number, len(shards))
            stored = _stored_shard(shard, to, reader)
            save_file(stored, partial / file_name, metadata={"format": "pt"})
            (partial / file_name).chmod(0o644)
            weight_map |= dict.fromkeys(stored, file_name)
            digests |= {name: digest(_bytes_of(tensor)) for name, tensor in stored.items()}
    _write_index(partial, to, weight_map, len(shards))
    _write_config(source_dir, partial, to, shards)
    save_digests(partial, digests)
    _copy_the_rest(source_dir, partial)
    partial.rename(target_dir)


def _shards(
    tensors: Iterable[ModelTensor], to: CheckpointFormat, shard_bytes: int
) -> Iterator[Shard]:
    shard: Shard = []
    size = 0
    for tensor in tensors:
        storage = storages(to, tensor)[0]
        if storage is Storage.FP4 and tensor.shape[1] % FP4_GROUP:
            raise CheckpointError(
                f"tensor {tensor.name} has {tensor.shape[1]} columns; {to.value} needs a multiple of {FP4_GROUP}",
                metadata={"tensor": tensor.name},
            )
        tensor_bytes = sum(map(_part_bytes, _parts(tensor, storage, to)))
        if shard and size + tensor_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append((tensor, storage))
        size += tensor_bytes
    if shard:
        yield shard


def _parts(tensor: ModelTensor, storage: Storage, to: CheckpointFormat) -> tuple[Part, ...]:
    dtype = tensor.dtype
    if dtype != "I64":
        dtype = to.plain_dtype if tensor.linear and to.plain_dtype else dtype
        dtype = "F32" if to is CheckpointFormat.FP32 else dtype
    return parts(storage, tensor.name, tensor.shape, dtype)


def _part_bytes(part: Part) -> int:
    return math.prod(part.shape) * ITEM_BYTES[part.dtype]


def _stored_shard(
    shard: Shard, to: CheckpointFormat, reader: CheckpointReader
) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = {}
    for tensor, storage in shard:
        wanted = _parts(tensor, storage, to)
        encoded = _encode(reader[tensor.name], storage, TORCH_DTYPES[wanted[0].dtype])
        for part, value in zip(wanted, encoded, strict=True):
            stored[part.name] = value.view(part.shape)
    return stored


def _encode(
    value: torch.Tensor, storage: Storage, plain_dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    match storage:
        case Storage.PLAIN:
            return (value.to(plain_dtype, copy=True).contiguous(),)
        case Storage.FP8:
            return quantize_fp8(value)
        case Storage.FP4:
            return quantize_fp4(value)
        case Storage.INT8:
            return quantize_int8(value)
        case Storage.INT8_OFFSET:
            codes, scale = quantize_int8(value)
            return codes, scale, torch.zeros_like(scale)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _file_name(to: CheckpointFormat, number: int, count: int) -> str:
    return f"{_stem(to)}-{number:05}-of-{count:05}.safetensors"


def _stem(to: CheckpointFormat) -> str:
    return "quant_model_weights" if to is CheckpointFormat.W8A8_MODELSLIM else "model"


def _write_index(
    folder: Path, to: CheckpointFormat, weight_map: dict[str, str], num_shards: int
) -> None:
    size = sum(
        (folder / _file_name(to, i + 1, num_shards)).stat().st_size for i in range(num_shards)
    )
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    path = folder / f"{_stem(to)}.safetensors.index.json"
    path.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _write_config(source: Path, folder: Path, to: CheckpointFormat, shards: list[Shard]) -> None:
    """The source's configuration with this format's own keys."""
    values: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    values.pop("quantization_config", None)
    values["torch_dtype"] = "float32" if to is CheckpointFormat.FP32 else "bfloat16"
    match to:
        case CheckpointFormat.FP8_FP4:
            values["expert_dtype"] = "fp4"
            values["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "scale_fmt": "ue8m0",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            }
        case CheckpointFormat.W8A8_COMPRESSED:
            values["quantization_config"] = {"quant_method": "compressed-tensors"}
        case CheckpointFormat.W8A8_MODELSLIM:
            description = {
                part.name: "W8A8_DYNAMIC" if storage is Storage.INT8_OFFSET else "FLOAT"
                for shard in shards
                for tensor, storage in shard
                for part in _parts(tensor, storage, to)
            }
            path = folder / "quant_model_description.json"
            path.write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _copy_the_rest(source: Path, folder: Path) -> None:
    """Tokenizer, chat template and whatever else stands beside the weights."""
    for path in source.iterdir():
        is_ours = path.name in ("config.json", "quant_model_description.json", DIGESTS)
        if path.is_file() and not is_ours and ".safetensors" not in path.name:
            shutil.copy2(path, folder / path.name)
