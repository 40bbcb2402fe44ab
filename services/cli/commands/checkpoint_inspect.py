"""`dspark checkpoint inspect`: what a checkpoint is, from its headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from common.checkpoint.digests import load_digests
from common.checkpoint.tensors import CONFIDENCE_HEAD_ALIAS
from common.model.config import ModelConfig
from services.cli.checkpoint_settings import CheckpointSettings
from services.cli.checkpoints import OpenCheckpoint, checkpoint_failures, gib, open_checkpoint, show
from services.cli.failures import EXIT_OK

KINDS = ((0, "window only"), (4, "CSA"), (128, "HCA"))
"""Layers by their ratio of compression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was counted, by type largest first."""

    num_files: int
    sizes: Mapping[str, int]
    counts: Mapping[str, int]
    layers: Mapping[str, int]
    num_mtp: int
    """Tensors of a drafter, or of a classic MTP layer."""
    has_short_name: bool
    """Of the confidence head."""
    num_digests: int


def run(settings: CheckpointSettings) -> int:
    opened = open_checkpoint(settings.checkpoint)
    with checkpoint_failures():
        num_digests = len(load_digests(opened.folder))
    config, headers = opened.config, opened.headers
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for tensor in headers.values():
        sizes[tensor.dtype] += tensor.num_bytes
        counts[tensor.dtype] += 1
    found = Found(
        num_files=len({tensor.path for tensor in headers.values()}),
        sizes=dict(sizes.most_common()),
        counts=counts,
        layers={name: len(config.layers_with_ratio(ratio)) for ratio, name in KINDS},
        num_mtp=sum(name.startswith("mtp.") for name in headers),
        has_short_name=any(name.endswith(CONFIDENCE_HEAD_ALIAS) for name in headers),
        num_digests=num_digests,
    )
    as_json = settings.output == "json"
    show(_json(opened, found) if as_json else _text(opened, found), settings.output)
    return EXIT_OK


def _text(opened: OpenCheckpoint, found: Found) -> dict[str, object]:
    config = opened.config
    kinds = ", ".join(f"{count} {name}" for name, count in found.layers.items())
    return {
        "folder": str(opened.folder),
        "format": opened.format.value,
        "tensors": len(opened.headers),
        "files": found.num_files,
        "size": gib(sum(found.sizes.values())),
        "types": ", ".join(
            f"{name} {found.counts[name]} tensors {gib(size)}" for name, size in found.sizes.items()
        ),
        "layers": f"{config.num_hidden_layers} ({kinds})",
        "experts": f"{config.n_routed_experts}, {config.num_experts_per_tok} per token",
        "drafter": _drafter(config, found),
        "digests": f"of {found.num_digests} tensors" if found.num_digests else "none",
    }


def _drafter(config: ModelConfig, found: Found) -> str:
    count = found.num_mtp
    if not config.has_drafter:
        return f"none ({count} tensors of a classic MTP layer, not used)" if count else "none"
    return (
        f"DSpark, {count} tensors: {config.num_drafter_layers} stages, block of {config.dspark_block_size}, "
        f"taps on layers {', '.join(map(str, config.dspark_target_layer_ids))}"
        + (", confidence head under its short name" if found.has_short_name else "")
    )


def _json(opened: OpenCheckpoint, found: Found) -> dict[str, object]:
    config = opened.config
    drafter = {
        "tensors": found.num_mtp,
        "stages": config.num_drafter_layers,
        "block_size": config.dspark_block_size,
        "tapped_layers": list(config.dspark_target_layer_ids),
        "has_short_confidence_name": found.has_short_name,
    }
    return {
        "folder": str(opened.folder),
        "format": opened.format.value,
        "tensors": len(opened.headers),
        "files": found.num_files,
        "size_bytes": sum(found.sizes.values()),
        "types": {
            name: {"tensors": found.counts[name], "size_bytes": size}
            for name, size in found.sizes.items()
        },
        "layers": config.num_hidden_layers,
        "layers_by_kind": found.layers,
        "experts": config.n_routed_experts,
        "experts_per_token": config.num_experts_per_tok,
        "drafter": drafter if config.has_drafter else None,
        "classic_mtp_tensors": 0 if config.has_drafter else found.num_mtp,
        "digests": found.num_digests,
    }
