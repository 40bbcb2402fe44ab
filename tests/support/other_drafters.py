"""Checkpoints of one target with other drafters, made from one that has a drafter of three layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def without_drafter(source: Path, folder: Path) -> Path:
    """The target alone, as if it had been published so."""
    tensors = {name: t for name, t in _tensors(source).items() if not name.startswith("mtp.")}
    return _save(source, folder, tensors, dspark_target_layer_ids=[], dspark_block_size=0)


def with_two_layers(source: Path, folder: Path) -> Path:
    """The last layer is left out, and its heads are the second one's."""
    tensors = _tensors(source)
    kept = {name: t for name, t in tensors.items() if not name.startswith("mtp.2.")}
    for name, tensor in tensors.items():
        moved = name.replace("mtp.2.", "mtp.1.")
        if name != moved and moved not in tensors:
            kept[moved] = tensor
    return _save(source, folder, kept, n_mtp_layers=2)


def _tensors(source: Path) -> dict[str, torch.Tensor]:
    return load_file(source / "model.safetensors")


def _save(source: Path, folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values | changes), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder
