"""Reads every weight once, to find damage. Knows scales and digests; builds no model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from common.checkpoint.digests import digest, load_digests, save_digests
from common.checkpoint.headers import Headers
from common.checkpoint.mapped import MappedFile
from common.checkpoint.reader import CheckpointReader
from common.checkpoint.spans import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was read."""

    num_bytes: int
    num_digests: int
    """Tensors that had one."""
    mb_per_s: float


def read_all(checkpoint_dir: Path, headers: Headers, *, record: bool = False) -> Checked:
    """Raise CheckpointError that names the first tensor whose scales or digest are wrong.

    `record` writes a digest of every tensor afterwards, instead of those that were there.
    """
    began = time.monotonic()
    digests = load_digests(checkpoint_dir)
    with CheckpointReader(checkpoint_dir, headers=headers) as reader:
        for name in reader:
            reader[name]
    if record:
        save_digests(checkpoint_dir, _digests(headers))
    num_bytes = sum(tensor.num_bytes for tensor in headers.values())
    return Checked(
        num_bytes=num_bytes,
        num_digests=len(digests.keys() & headers.keys()),
        mb_per_s=num_bytes / 1e6 / max(time.monotonic() - began, 1e-9),
    )


def _digests(headers: Headers) -> dict[str, str]:
    files = {path: MappedFile(path) for path in {tensor.path for tensor in headers.values()}}
    digests = {}
    for name, tensor in headers.items():
        file = files[tensor.path]
        span = Span(tensor.begin, tensor.end)
        digests[name] = digest(file.bytes_of(span))
        file.drop(span)
    for file in files.values():
        file.close()
    return digests
