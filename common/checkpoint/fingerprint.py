"""What identifies a checkpoint: its configuration and samples of its weights' values. Reads a few megabytes at most.

Values are sampled, not bytes: a checkpoint that was converted without loss, sharded anew or copied is the same model, and
workers that hold it in different formats may exchange state. Digests that lie beside the weights take no part, because a
copy without them is the same model too. Another training run, quantiser or set of experts differs nearly everywhere, so
a run of values per tensor tells it apart; a single changed value is what digests are for, not this.

Target and drafter are apart, because the text is the target's alone: workers with other drafters may continue each other's
requests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from common.checkpoint.headers import read_headers
from common.checkpoint.model_tensor import Linear
from common.checkpoint.read_options import ReadOptions
from common.checkpoint.reader import CheckpointReader
from common.checkpoint.stored_parts import StoredParts
from common.checkpoint.tensors import model_tensors
from common.errors import CheckpointError
from common.model.config import ModelConfig
from common.model.weights import TensorPart

RUN_VALUES = 64
"""Neighbours in a row that are looked at. They are in one page of a file, and their scales in another."""
ALIGNED_TO = 32
"""Runs begin where a group of FP4 may begin."""
MAX_EXPERT_TENSORS = 4096
"""Of more matrices of routed experts, which are most of a large model's tensors, an even choice is looked at."""

STORAGE_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "dtype",
        "expert_dtype",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
    }
)
"""Keys of config.json that say how weights are stored, or by what they were written."""
DRAFTER_KEYS = frozenset({"n_mtp_layers", "num_nextn_predict_layers"})
"""Keys that are about the drafter, beside those that say so."""
DRAFTER_PREFIX = "mtp."
"""Of its tensors' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """SHA-256 of what a model is, hexadecimal."""

    target: str
    """Two workers that agree in it hold the same model: they give the same text."""
    drafter: str
    """Two workers that agree in it draft alike; empty without a drafter."""


def fingerprint(checkpoint_dir: Path) -> Fingerprint:
    """What target and drafter are. Raises CheckpointError when the configuration, a header or a tensor of the model cannot
    be read."""
    config, headers = ModelConfig.load(checkpoint_dir), read_headers(checkpoint_dir)
    parts = StoredParts(headers)
    target, drafter = (
        [_run(name, parts.shape(name)) for name in _sampled_names(config, parts, of_drafter)]
        for of_drafter in (False, True)
    )
    target_values, drafter_values = _configuration(checkpoint_dir, config)
    options = ReadOptions(slow_mb_per_s=0, verify_digests=False)
    with CheckpointReader(
        checkpoint_dir, headers=headers, wanted=[*target, *drafter], options=options
    ) as reader:

        def digest(values: dict[str, Any], sampled: Sequence[TensorPart]) -> str:
            found = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
            for part in sampled:
                found.update(f"{part.name} {list(parts.shape(part.name))}\n".encode())
                for piece in reader.pieces(part):
                    found.update(_values(piece))
            return found.hexdigest()

        return Fingerprint(
            target=digest(target_values, target),
            drafter=digest(drafter_values, drafter) if config.has_drafter else "",
        )


def _configuration(
    checkpoint_dir: Path, config: ModelConfig
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What config.json says of the target and of the drafter."""
    values = json.loads((checkpoint_dir / "config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in values.items() if key not in STORAGE_KEYS}
    kept["compress_ratios"] = list(config.compress_ratios)
    drafter = {key: kept.pop(key) for key in list(kept) if _is_drafters(key)}
    return kept, drafter


def _is_drafters(key: str) -> bool:
    return key.startswith("dspark_") or key in DRAFTER_KEYS


def _sampled_names(config: ModelConfig, parts: StoredParts, of_drafter: bool) -> Iterator[str]:
    experts = []
    for tensor in model_tensors(config):
        if tensor.name.startswith(DRAFTER_PREFIX) is not of_drafter:
            continue
        if tensor.name not in parts.names:
            if tensor.is_optional:
                continue
            raise CheckpointError(
                f"the checkpoint lacks tensor {tensor.name}", metadata={"tensor": tensor.name}
            )
        if tensor.linear is Linear.ROUTED_EXPERT:
            experts.append(tensor.name)
        else:
            yield tensor.name
    step = -(-len(experts) // MAX_EXPERT_TENSORS) or 1
    # Three matrices an expert: a step that three divides would always look at the same one.
    yield from experts[:: step + (step % 3 == 0)]


def _run(name: str, shape: tuple[int, ...]) -> TensorPart:
    """Somewhere in the tensor, by its name, so that neighbours are not all looked at in the same place."""
    place = xxhash.xxh3_64_intdigest(name.encode())
    if len(shape) == 1:
        return TensorPart(name, rows=_stretch(place, shape[0]))
    row = place % shape[0]
    return TensorPart(name, rows=slice(row, row + 1), columns=_stretch(place >> 20, shape[1]))


def _stretch(place: int, size: int) -> slice:
    num_starts = max(1, (size - RUN_VALUES) // ALIGNED_TO + 1)
    start = place % num_starts * ALIGNED_TO
    return slice(start, min(start + RUN_VALUES, size))


def _values(piece: torch.Tensor) -> bytes:
    is_integer = not piece.is_floating_point()
    # Adding zero makes the two zeros one.
    exact = piece.to(torch.int64) if is_integer else piece.to(torch.float32) + 0.0
    return exact.contiguous().numpy().tobytes()
