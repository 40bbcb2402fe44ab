"""How long a checkpoint takes to load and what memory that takes, beside safetensors alone on the same files.

Knows files and processes; every measurement is a process of its own, as the highest memory of one never sinks.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import safe_open

from common.checkpoint.formats import CheckpointFormat
from common.checkpoint.headers import read_headers, shard_paths
from common.checkpoint.loader import load_model
from common.checkpoint.rehearsal import asked_parts
from common.checkpoint.stored_parts import StoredParts
from common.model.config import ModelConfig
from common.model.weights import TensorPart
from common.parallel.collectives import Communicator
from common.parallel.mesh import MeshShape
from common.parallel.shard import Shard
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

MESHES = {"1_rank": MeshShape(), "4_ranks": MeshShape(tp=4, ep=4)}
BARRIER_S = 120.0
"""How long the first process waits for the last one to be there."""

Way = Callable[[Path, Shard], Callable[[], object]]
"""Prepares what is no part of reading, and gives what is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One loading by all ranks at once."""

    seconds: float
    """From the first one's start to the last one's end."""
    peak_bytes: int
    """By which the highest resident memory of a process exceeds that before, of the process where that is most."""


def run_loading(checkpoint_dir: Path, say: Callable[[str], None]) -> dict[str, float]:
    """Seconds and memory of both ways of reading, with the files in the system's cache and without."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="dspark-load-") as parent:
        folder = _generate(checkpoint_dir, Path(parent) / "model")
        num_bytes = sum(tensor.num_bytes for tensor in read_headers(folder).values())
        figures["load.checkpoint_bytes"] = num_bytes
        say(f"generated {num_bytes / 1e9:.2f} GB in {len(shard_paths(folder))} files")
        for (ranks, mesh), cache in itertools.product(MESHES.items(), ("cold", "warm")):
            prefix = f"load.{cache}.{ranks}"
            read_bytes = sum(_rank_bytes(folder, shard) for shard in _shards(mesh))
            figures[f"{prefix}.read_bytes"] = read_bytes
            runs: dict[str, list[Measured]] = {name: [] for name in WAYS}
            # By turns, so that whatever else the machine does falls on both.
            for _ in range(REPEATS):
                for name, way in WAYS.items():
                    runs[name].append(_measure(way, folder, mesh, is_cold=cache == "cold"))
            for name, measured in runs.items():
                seconds = statistics.median(m.seconds for m in measured)
                peak = statistics.median(m.peak_bytes for m in measured)
                figures[f"{prefix}.{name}_s"] = seconds
                figures[f"{prefix}.{name}_mb_per_s"] = read_bytes / 1e6 / seconds
                figures[f"{prefix}.{name}_peak_bytes"] = peak
                say(f"{prefix}.{name}: {seconds:.2f} s, peak {peak / 1e9:.2f} GB a rank")
            figures[f"{prefix}.ours_over_safetensors"] = (
                figures[f"{prefix}.ours_s"] / figures[f"{prefix}.safetensors_s"]
            )
    return figures


def _shards(mesh: MeshShape) -> list[Shard]:
    return [Shard(mesh=mesh, rank=rank) for rank in range(mesh.num_ranks)]


def _rank_bytes(folder: Path, shard: Shard) -> int:
    headers = read_headers(folder)
    parts = StoredParts(headers)
    return sum(map(parts.num_bytes, asked_parts(ModelConfig.load(folder), headers, shard)))


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


def _measure(way: Way, folder: Path, mesh: MeshShape, *, is_cold: bool) -> Measured:
    for path in shard_paths(folder):
        with path.open("rb") as file:
            if is_cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(64 << 20):
                    pass
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(mesh.num_ranks)
    with spawn.Pool(mesh.num_ranks, initializer=_wait_at, initargs=(barrier,)) as pool:
        calls = [pool.apply_async(_timed, (way, folder, shard)) for shard in _shards(mesh)]
        ranks = [call.get(timeout=10 * BARRIER_S) for call in calls]
    return Measured(
        seconds=max(rank.ended for rank in ranks) - min(rank.began for rank in ranks),
        peak_bytes=max(rank.peak_bytes for rank in ranks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """One rank, by the machine's clock."""

    began: float
    ended: float
    peak_bytes: int


_barrier: Barrier | None = None


def _wait_at(barrier: Barrier) -> None:
    """A pool's processes share nothing but what they are given at their start."""
    global _barrier
    _barrier = barrier


def _timed(way: Way, folder: Path, shard: Shard) -> _Timed:
    torch.set_num_threads(1)
    read = way(folder, shard)
    assert _barrier is not None
    _barrier.wait(BARRIER_S)
    before = _resident_bytes()
    began = time.monotonic()
    held = read()
    ended = time.monotonic()
    peak = _peak_bytes() - before
    del held
    return _Timed(began=began, ended=ended, peak_bytes=peak)


def _load(folder: Path, shard: Shard) -> Callable[[], object]:
    """Headers, contract and all, in a process that has imported everything, as the other way's has."""
    asked_parts(ModelConfig.load(folder), read_headers(folder), shard)
    return lambda: load_model(
        folder, dtype=torch.bfloat16, device=torch.device("cpu"), comm=Communicator(shard)
    )


def _read_with_safetensors(folder: Path, shard: Shard) -> Callable[[], object]:
    """The same parts as the process's own, as a model needs them; without the copy nothing would be read yet."""
    headers = read_headers(folder)
    by_file: dict[Path, list[TensorPart]] = {}
    for part in asked_parts(ModelConfig.load(folder), headers, shard):
        by_file.setdefault(headers[part.name].path, []).append(part)

    def read() -> list[torch.Tensor]:
        held: list[torch.Tensor] = []
        for path, parts in by_file.items():
            with safe_open(path, framework="pt") as file:
                held += [_cut(file, part).clone() for part in parts]
        return held

    return read


def _cut(file: Any, part: TensorPart) -> torch.Tensor:
    if part.is_whole:
        return cast(torch.Tensor, file.get_tensor(part.name))
    stored = file.get_slice(part.name)
    rows = part.rows or slice(None)
    return cast(torch.Tensor, stored[rows] if part.columns is None else stored[rows, part.columns])


WAYS: dict[str, Way] = {"ours": _load, "safetensors": _read_with_safetensors}


def _resident_bytes() -> int:
    # Not the highest so far: imports let go of some again.
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
