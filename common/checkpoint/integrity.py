"""Reads every weight once, to find damage. Knows scales and digests; builds no model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from common.checkpoint.digests import digest, load_digests, save_digests
from common.checkpoint.headers import Headers, StoredTensor
from common.checkpoint.mapped import MappedFile
from common.checkpoint.reader import CheckpointReader
from common.checkpoint.sanity import require_written
from common.checkpoint.spans import Span
from common.checkpoint.stored_parts import StoredParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was read."""

    num_bytes: int
    num_digests: int
    """Tensors that had one."""
    mb_per_s: float


def read_all(checkpoint_dir: Path, headers: Headers, *, record: bool = False) -> Checked:
    """Raise CheckpointError that names the first tensor whose scales or digest are wrong, or that was never written.

    `record` writes a digest of every tensor afterwards, instead of those that were there.
    """
    began = time.monotonic()
    digests = load_digests(checkpoint_dir)
    parts, files = StoredParts(headers), _files(headers)
    with CheckpointReader(checkpoint_dir, headers=headers) as reader:
        for name in reader:
            reader[name]
            _require_written(files, *parts.tensors(name))
    if record:
        save_digests(checkpoint_dir, _digests(headers, files))
    for file in files.values():
        file.close()
    num_bytes = sum(tensor.num_bytes for tensor in headers.values())
    return Checked(
        num_bytes=num_bytes,
        num_digests=len(digests.keys() & headers.keys()),
        mb_per_s=num_bytes / 1e6 / max(time.monotonic() - began, 1e-9),
    )


def _files(headers: Headers) -> dict[Path, MappedFile]:
    return {path: MappedFile(path) for path in {tensor.path for tensor in headers.values()}}


def _require_written(
    files: dict[Path, MappedFile], matrix: StoredTensor, *scales: StoredTensor
) -> None:
    """Of what has just been read, so that it is in the system's cache."""
    looked_at = [scale for scale in scales if not scale.name.endswith("_offset")]
    if len(matrix.shape) > 1:
        looked_at.append(matrix)
    for tensor in looked_at:
        span = Span(tensor.begin, tensor.end)
        require_written(tensor, files[tensor.path].bytes_of(span))
        files[tensor.path].drop(span)


def _digests(headers: Headers, files: dict[Path, MappedFile]) -> dict[str, str]:
    digests = {}
    for name, tensor in headers.items():
        file = files[tensor.path]
        span = Span(tensor.begin, tensor.end)
        digests[name] = digest(file.bytes_of(span))
        file.drop(span)
    return digests
