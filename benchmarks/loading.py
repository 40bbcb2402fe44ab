"""How long a checkpoint takes to load and what memory that takes, beside safetensors alone on the same files.

Knows files and processes; every measurement is a process of its own, as the highest memory of one never sinks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.headers import read_headers, shard_paths
from common.checkpoint.loader import load_model
from tools.make_sparse_checkpoint import Published, make_sparse_checkpoint

REPEATS = 3
SHARD_BYTES = 512 << 20
SIZES = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "n_routed_experts": 68,
    "q_lora_rank": 256,
    "o_lora_rank": 128,
    "vocab_size": 8192,
}
"""Changes to the shipped model's configuration that make it about 2 GB of BF16."""

Measured = tuple[float, int]
"""Seconds, and bytes by which the highest resident memory exceeds that before."""


def run_loading(checkpoint_dir: Path, say: Callable[[str], None]) -> dict[str, float]:
    """Seconds and memory of both ways of reading, with the files in the system's cache and without."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="dspark-load-") as parent:
        folder = _generate(checkpoint_dir, Path(parent) / "model")
        num_bytes = sum(tensor.num_bytes for tensor in read_headers(folder).values())
        figures["load.checkpoint_bytes"] = num_bytes
        say(f"generated {num_bytes / 1e9:.2f} GB in {len(shard_paths(folder))} files")
        for cache in ("cold", "warm"):
            runs: dict[str, list[Measured]] = {name: [] for name in WAYS}
            # By turns, so that whatever else the machine does falls on both.
            for _ in range(REPEATS):
                for name, way in WAYS.items():
                    runs[name].append(_measure(way, folder, is_cold=cache == "cold"))
            prefix = f"load.{cache}.1_rank"
            for name, measured in runs.items():
                seconds = statistics.median(m[0] for m in measured)
                peak = statistics.median(m[1] for m in measured)
                figures[f"{prefix}.{name}_s"] = seconds
                figures[f"{prefix}.{name}_mb_per_s"] = num_bytes / 1e6 / seconds
                figures[f"{prefix}.{name}_peak_bytes"] = peak
                say(f"{prefix}.{name}: {seconds:.2f} s, peak {peak / 1e9:.2f} GB")
            figures[f"{prefix}.ours_over_safetensors"] = (
                figures[f"{prefix}.ours_s"] / figures[f"{prefix}.safetensors_s"]
            )
    return figures


def _generate(checkpoint_dir: Path, folder: Path) -> Path:
    """True headers, and numbers instead of holes: holes cost a disk nothing to read."""
    values = json.loads((checkpoint_dir / "config.json").read_text(encoding="utf-8")) | SIZES
    published = Published(config=values, format=CheckpointFormat.BF16)
    make_sparse_checkpoint(published, folder, shard_bytes=SHARD_BYTES)
    noise = np.random.default_rng(0).normal(0, 0.02, 16 << 20).astype(np.float32)
    block = torch.from_numpy(noise).bfloat16().view(torch.uint8).numpy().tobytes()
    for path in shard_paths(folder):
        size = path.stat().st_size
        begin = 8 + int.from_bytes(path.open("rb").read(8), "little")
        with path.open("r+b") as file:
            file.seek(begin)
            while (left := size - file.tell()) > 0:
                file.write(block[:left])
            os.fsync(file.fileno())
    return folder


def _measure(way: Callable[[Path], object], folder: Path, *, is_cold: bool) -> Measured:
    for path in shard_paths(folder):
        with path.open("rb") as file:
            if is_cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(64 << 20):
                    pass
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_timed, (way, folder))


def _timed(way: Callable[[Path], object], folder: Path) -> Measured:
    torch.set_num_threads(1)
    before = _resident_bytes()
    began = time.perf_counter()
    held = way(folder)
    seconds = time.perf_counter() - began
    peak = _peak_bytes() - before
    del held
    return seconds, peak


def _load(folder: Path) -> object:
    return load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"))


def _read_with_safetensors(folder: Path) -> object:
    """Every tensor as the process's own, as a model needs it; without the copy nothing would be read yet."""
    tensors: dict[str, torch.Tensor] = {}
    for path in shard_paths(folder):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    return tensors


WAYS: dict[str, Callable[[Path], object]] = {"ours": _load, "safetensors": _read_with_safetensors}


def _resident_bytes() -> int:
    # Not the highest so far: imports let go of some again.
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
