"""Damage to checkpoints on disk: tensors that are changed, removed or flipped by a bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from common.checkpoint.digests import FILE_NAME as DIGESTS
from common.checkpoint.headers import read_headers
from tests.support.tiny_checkpoint import Tensors


def edit(folder: Path, change: Callable[[Tensors], None], *, keep_digests: bool = False) -> None:
    """Change the tensors of a checkpoint of one file."""
    (path,) = folder.glob("*.safetensors")
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    if not keep_digests:
        (folder / DIGESTS).unlink(missing_ok=True)


def without(tensors: Tensors, text: str) -> None:
    for name in [name for name in tensors if text in name]:
        del tensors[name]


def flip(folder: Path, name: str, byte: int, bit: int) -> None:
    """Change one bit of a tensor in its file."""
    tensor = read_headers(folder)[name]
    with tensor.path.open("r+b") as file:
        file.seek(tensor.begin + byte)
        value = file.read(1)[0]
        file.seek(tensor.begin + byte)
        file.write(bytes([value ^ 1 << bit]))
