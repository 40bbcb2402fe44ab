"""Reads a safetensors checkpoint of one or many shards, headers first. Knows names, shapes and bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.errors import CheckpointError

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes in all."""


class CheckpointReader(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint by name, memory-mapped and read when asked for. Use as a context manager."""

    def __init__(self, checkpoint_dir: Path, on_progress: Progress | None = None) -> None:
        self._paths = _shards(checkpoint_dir)
        self._on_progress = on_progress
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._num_bytes = sum(map(_tensor_bytes, self._paths))
        self._num_read = 0

    def __enter__(self) -> CheckpointReader:
        for path in self._paths:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is not a readable safetensors file: {error}"
                ) from error
            self._files |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if self._on_progress is not None:
            self._num_read += tensor.numel() * tensor.element_size()
            self._on_progress(self._num_read, self._num_bytes)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _tensor_bytes(path: Path) -> int:
    """The size of a shard without its header, so that progress ends at the whole."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header_bytes


def fingerprint(checkpoint_dir: Path) -> str:
    """SHA-256 over config.json's values and every shard's header and contents, hexadecimal.

    Two workers whose fingerprints agree hold the same model; file names, formatting and dates do not count.
    """
    digest = hashlib.sha256()
    config = json.loads((checkpoint_dir / "config.json").read_text(encoding="utf-8"))
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in _shards(checkpoint_dir):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _shards(checkpoint_dir: Path) -> list[Path]:
    index = checkpoint_dir / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not an index of shards: {error!r}") from error
        paths = [checkpoint_dir / name for name in names]
    else:
        paths = [checkpoint_dir / "model.safetensors"]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise CheckpointError(
            f"{checkpoint_dir} lacks {', '.join(missing[:8])} ({len(missing)} files in all)"
        )
    return paths
