"""Writes the true headers of a published checkpoint into sparse files: hundreds of gigabytes of holes, a few megabytes of disk.

Everything that looks at headers only (inspect, validate, plan) can so be tried at full size without the weights.

    python -m tools.make_sparse_checkpoint flash-dspark /tmp/flash-dspark
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint.formats import CheckpointFormat, storages
from common.checkpoint.headers import ITEM_BYTES
from common.checkpoint.storage import Part, parts
from common.checkpoint.tensors import classic_mtp_tensors, model_tensors
from common.model.config import ModelConfig
from tools.official_configs import FLASH, FLASH_DSPARK, PRO, PRO_DSPARK

SHARD_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published checkpoint."""

    config: dict[str, Any]
    format: CheckpointFormat = CheckpointFormat.FP8_FP4
    has_own_vocabulary: bool = False
    """Its drafter has an embedding and a head of its own."""


PUBLISHED = {
    "flash": Published(config=FLASH),
    "flash-dspark": Published(config=FLASH_DSPARK),
    "flash-dspark-w8a8": Published(config=FLASH_DSPARK, format=CheckpointFormat.W8A8_COMPRESSED),
    "flash-dspark-modelslim": Published(
        config=FLASH_DSPARK, format=CheckpointFormat.W8A8_MODELSLIM, has_own_vocabulary=True
    ),
    "pro": Published(config=PRO),
    "pro-dspark": Published(config=PRO_DSPARK),
}


def make_sparse_checkpoint(
    published: Published, folder: Path, *, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write config.json, the index and the shards into a new folder. All weights read as zero."""
    folder.mkdir(parents=True)
    values = dict(published.config)
    if published.format is not CheckpointFormat.FP8_FP4:
        values.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    shards = list(_shards(stored_parts(published), shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_sparse(folder / file_name, shard)
        weight_map |= dict.fromkeys((part.name for part in shard), file_name)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return folder


def stored_parts(published: Published) -> Iterator[Part]:
    """Every tensor of the checkpoint's files."""
    config = ModelConfig.from_json(published.config)
    drafter = () if config.has_drafter else classic_mtp_tensors(config)
    for tensor in itertools.chain(model_tensors(config), drafter):
        if not tensor.is_optional or published.has_own_vocabulary:
            storage = storages(published.format, tensor)[0]
            yield from parts(storage, tensor.name, tensor.shape, tensor.dtype)


def _shards(stored: Iterator[Part], shard_bytes: int) -> Iterator[list[Part]]:
    shard: list[Part] = []
    size = 0
    for part in stored:
        shard.append(part)
        size += _num_bytes(part)
        if size >= shard_bytes:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def _write_sparse(path: Path, shard: list[Part]) -> None:
    header: dict[str, Any] = {}
    begin = 0
    for part in shard:
        end = begin + _num_bytes(part)
        header[part.name] = {
            "dtype": part.dtype,
            "shape": list(part.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + begin)


def _num_bytes(part: Part) -> int:
    return math.prod(part.shape) * ITEM_BYTES[part.dtype]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.make_sparse_checkpoint", description=__doc__
    )
    parser.add_argument("name", choices=sorted(PUBLISHED))
    parser.add_argument("folder", type=Path, help="created; must not exist")
    options = parser.parse_args()
    print(make_sparse_checkpoint(PUBLISHED[options.name], options.folder))


if __name__ == "__main__":
    main()
