"""What is in a checkpoint's files: names, types, shapes and places, from the headers. Reads no weights and needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

ITEM_BYTES = {
    "BOOL": 1,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file has it; `begin` and `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


Headers = dict[str, StoredTensor]
"""By name, in the order of the files."""


def read_headers(checkpoint_dir: Path) -> Headers:
    """All tensors of a checkpoint.

    Raises CheckpointError that names a missing or unreadable file, and the first tensor that a truncated one cuts off.
    """
    headers: Headers = {}
    for path in shard_paths(checkpoint_dir):
        for tensor in _shard(path):
            twin = headers.setdefault(tensor.name, tensor)
            if twin is not tensor:
                raise CheckpointError(
                    f"tensor {tensor.name} is in {twin.path.name} and in {path.name}",
                    metadata={"tensor": tensor.name},
                )
    return headers


def shard_paths(checkpoint_dir: Path) -> list[Path]:
    """The files that hold the weights, by the index where there is one. Raises CheckpointError for a missing one."""
    indexes = sorted(checkpoint_dir.glob("*.safetensors.index.json"))
    if indexes:
        paths = [checkpoint_dir / name for name in _indexed_files(indexes[0])]
    else:
        paths = sorted(checkpoint_dir.glob("*.safetensors"))
        paths = paths or [checkpoint_dir / "model.safetensors"]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise CheckpointError(
            f"{checkpoint_dir} lacks {', '.join(missing[:8])} ({len(missing)} files in all)"
        )
    return paths


def _indexed_files(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of shards: {error!r}") from error
    elsewhere = [name for name in names if Path(name).name != name]
    if elsewhere:
        raise CheckpointError(f"{index} names {elsewhere[0]!r}, which is not a file beside it")
    return names


def _shard(path: Path) -> Iterator[StoredTensor]:
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or header_bytes > min(file_bytes - 8, MAX_HEADER_BYTES):
            raise _unreadable(path, f"its header does not fit its {file_bytes} bytes")
        text = file.read(header_bytes)
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = [_stored(name, entry, path, 8 + header_bytes) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _unreadable(path, f"its header is not one ({error!r})") from error
    cut_off = [tensor for tensor in tensors if tensor.end > file_bytes]
    if cut_off:
        first = min(cut_off, key=lambda tensor: tensor.begin)
        raise _unreadable(
            path,
            f"it ends within tensor {first.name}; {len(cut_off)} of {len(tensors)} tensors are cut off "
            f"({file_bytes} of {max(tensor.end for tensor in tensors)} bytes)",
            first.name,
        )
    yield from tensors


def _stored(name: str, entry: dict[str, Any], path: Path, start: int) -> StoredTensor:
    dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
    begin, end = map(int, entry["data_offsets"])
    item_bytes = ITEM_BYTES.get(dtype)
    num_bytes = end - begin if item_bytes is None else math.prod(shape) * item_bytes
    if begin < 0 or num_bytes < 0 or end - begin != num_bytes:
        raise _unreadable(
            path,
            f"tensor {name} has {end - begin} bytes, not those of {dtype} {list(shape)}",
            name,
        )
    return StoredTensor(name, dtype, shape, path, start + begin, start + end)


def _unreadable(path: Path, why: str, tensor: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a readable safetensors file: {why}",
        metadata={"tensor": tensor} if tensor else None,
    )
