"""Digests of stored tensors, beside the weights: the only thing that can tell a flipped bit from a weight.

`convert` writes them, `validate --record-digests` does for a checkpoint that is trusted as it is; whoever reads a tensor
that has one checks it. Official checkpoints come without: a scale that is wrong by a power of two is then just a scale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import xxhash

from common.errors import CheckpointError

FILE_NAME = "tensor_digests.json"
ALGORITHM = "xxh3_64"


def digest(content: bytes | memoryview) -> str:
    """16 hexadecimal digits. Finds accidents; whoever can write the file can write the digest."""
    return xxhash.xxh3_64_hexdigest(content)


class RunningDigest:
    """The same of content that comes in pieces."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, content: bytes | memoryview) -> None:
        self._hash.update(content)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def load_digests(checkpoint_dir: Path) -> dict[str, str]:
    """By tensor name; empty when the checkpoint has none. Raises CheckpointError when the file cannot be read."""
    path = checkpoint_dir / FILE_NAME
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["algorithm"] != ALGORITHM:
            raise CheckpointError(f"{path}: algorithm {values['algorithm']!r} is not {ALGORITHM!r}")
        return {str(name): str(value) for name, value in values["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a list of digests: {error!r}") from error


def save_digests(checkpoint_dir: Path, digests: Mapping[str, str]) -> None:
    values = {"algorithm": ALGORITHM, "tensors": dict(sorted(digests.items()))}
    path = checkpoint_dir / FILE_NAME
    path.write_text(json.dumps(values, indent=0) + "\n", encoding="utf-8")
