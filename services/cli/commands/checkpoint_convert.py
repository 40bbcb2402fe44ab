"""`dspark checkpoint convert`: the same model in another format."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from common.checkpoint.folder import find_checkpoint
from common.checkpoint.formats import CheckpointFormat
from services.cli.checkpoint_settings import ConvertSettings
from services.cli.checkpoints import checkpoint_failures, gib, open_checkpoint, show
from services.cli.failures import EXIT_OK


def run(settings: ConvertSettings) -> int:
    began = time.monotonic()
    with checkpoint_failures():
        source = find_checkpoint(settings.checkpoint)
        from common.checkpoint.convert import convert_checkpoint

        with tqdm(unit="B", unit_scale=True, file=sys.stderr, disable=None, leave=False) as bar:

            def on_progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            convert_checkpoint(
                source,
                settings.target,
                CheckpointFormat(settings.to),
                shard_bytes=int(settings.shard_gb * 1e9),
                on_progress=on_progress,
            )
    written = open_checkpoint(str(settings.target))
    size = sum(tensor.num_bytes for tensor in written.headers.values())
    figures: dict[str, object] = {
        "written": str(settings.target),
        "format": written.format.value,
        "tensors": len(written.headers),
        **({"size_bytes": size} if settings.output == "json" else {"size": gib(size)}),
        "seconds": round(time.monotonic() - began, 1),
    }
    show(figures, settings.output)
    return EXIT_OK
