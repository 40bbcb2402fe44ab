"""`dspark checkpoint inspect`: what a checkpoint is, from its headers."""

from __future__ import annotations

from collections import Counter

from common.checkpoint.digests import load_digests
from common.checkpoint.tensors import CONFIDENCE_HEAD_ALIAS
from services.cli.checkpoint_settings import CheckpointSettings
from services.cli.checkpoints import OpenCheckpoint, checkpoint_failures, gib, open_checkpoint, show
from services.cli.failures import EXIT_OK


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
    num_files = len({tensor.path for tensor in headers.values()})
    kinds = ", ".join(
        f"{len(config.layers_with_ratio(ratio))} {name}"
        for ratio, name in ((0, "window only"), (4, "CSA"), (128, "HCA"))
    )
    figures: dict[str, object] = {
        "folder": str(opened.folder),
        "format": opened.format.value,
        "tensors": len(headers),
        "files": num_files,
        "size": gib(sizes.total()),
        "types": ", ".join(
            f"{name} {counts[name]} tensors {gib(size)}" for name, size in sizes.most_common()
        ),
        "layers": f"{config.num_hidden_layers} ({kinds})",
        "experts": f"{config.n_routed_experts}, {config.num_experts_per_tok} per token",
        "drafter": _drafter(opened),
        "digests": f"of {num_digests} tensors" if num_digests else "none",
    }
    show(figures, settings.output)
    return EXIT_OK


def _drafter(opened: OpenCheckpoint) -> str:
    count = sum(name.startswith("mtp.") for name in opened.headers)
    if not opened.config.has_drafter:
        return f"none ({count} tensors of a classic MTP layer, not used)" if count else "none"
    config = opened.config
    aliased = any(name.endswith(CONFIDENCE_HEAD_ALIAS) for name in opened.headers)
    return (
        f"DSpark, {count} tensors: {config.num_drafter_layers} stages, block of {config.dspark_block_size}, "
        f"taps on layers {', '.join(map(str, config.dspark_target_layer_ids))}"
        + (", confidence head under its short name" if aliased else "")
    )
