"""Checkpoint files: official tensor names, bf16 matrices, fp32 where the model computes in fp32."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.train_tiny.config import SHIPPED
from tools.train_tiny.weights import Weights

FP32_SUFFIXES = ("attn_sink", ".ape", "gate.bias")


def is_fp32(name: str) -> bool:
    return name.endswith(FP32_SUFFIXES) or ".hc_" in name or name.startswith("hc_")


def shipped_dtype(name: str, tensor: Tensor) -> torch.dtype:
    if not tensor.is_floating_point():
        return torch.int64
    return torch.float32 if is_fp32(name) else torch.bfloat16


def round_to_shipped(weights: Weights) -> Weights:
    """The values that will be served, in fp32: train the drafter on these, not on finer ones."""
    return {
        name: tensor.detach().to(shipped_dtype(name, tensor)).to(tensor.dtype)
        for name, tensor in weights.items()
    }


def official(weights: Weights) -> Weights:
    """Experts one by one, under the names of the public checkpoints."""
    tensors: Weights = {}
    for name, tensor in weights.items():
        stem = name.removesuffix("w13").removesuffix("w2")
        if name.endswith("experts.w13"):
            for e, (w1, w3) in enumerate(t.chunk(2, 0) for t in tensor):
                tensors[f"{stem}{e}.w1.weight"], tensors[f"{stem}{e}.w3.weight"] = w1, w3
        elif name.endswith("experts.w2"):
            tensors |= {f"{stem}{e}.w2.weight": t for e, t in enumerate(tensor)}
        else:
            tensors[name] = tensor
    return tensors


def stacked(tensors: Weights) -> Weights:
    """The inverse of `official`."""
    weights = {k: v for k, v in tensors.items() if ".experts." not in k}
    stems = sorted({k.split(".experts.")[0] for k in tensors if ".experts." in k})
    for stem in stems:
        names = [f"{stem}.experts.{e}" for e in range(_num_experts(tensors, stem))]
        weights[f"{stem}.experts.w13"] = torch.stack(
            [torch.cat([tensors[f"{n}.w1.weight"], tensors[f"{n}.w3.weight"]]) for n in names]
        )
        weights[f"{stem}.experts.w2"] = torch.stack([tensors[f"{n}.w2.weight"] for n in names])
    return weights


def _num_experts(tensors: Weights, stem: str) -> int:
    ids = {int(k.split(".experts.")[1].split(".")[0]) for k in tensors if f"{stem}.experts." in k}
    return max(ids) + 1


def write(folder: Path, weights: Weights) -> int:
    """Write `model.safetensors` and `config.json`; the number of bytes in the weights file."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(shipped_dtype(name, tensor)).contiguous().clone()
        for name, tensor in official(weights).items()
    }
    path = folder / "model.safetensors"
    save_file(tensors, str(path) + ".new", metadata={"format": "pt"})
    Path(str(path) + ".new").chmod(0o644)
    Path(str(path) + ".new").replace(path)
    (folder / "config.json").write_text(json.dumps(SHIPPED, indent=1) + "\n")
    return path.stat().st_size


def read(folder: Path) -> Weights:
    """The weights of a checkpoint in fp32, stacked as training wants them."""
    tensors = load_file(str(folder / "model.safetensors"))
    return stacked({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()})
