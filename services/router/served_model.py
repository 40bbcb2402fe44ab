"""The model behind the workers, as they report it. Knows limits; never sees a worker's load."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dspark.v1 import worker_pb2

POSITIONS_PER_PAGE = 128
"""As the wire contract has it, on every worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What requests are checked against."""

    fingerprint: str
    max_context_length: int
    """Largest prompt plus completion."""
    vocab_size: int
    draft_length: int


def served_model(fingerprint: str, infos: Iterable[worker_pb2.WorkerInfo]) -> ServedModel:
    """The model as the workers that serve it report it, at least one, with the smallest context one of them can hold."""
    serving = [info for info in infos if info.model_fingerprint == fingerprint]
    return ServedModel(
        fingerprint=fingerprint,
        max_context_length=min(_context_limit(info) for info in serving),
        vocab_size=serving[0].vocab_size,
        draft_length=serving[0].draft_length,
    )


def _context_limit(info: worker_pb2.WorkerInfo) -> int:
    """A request that needs more pages than a worker has would wait for ever."""
    if info.num_pages == 0:
        return info.max_context_length
    return min(info.max_context_length, info.num_pages * POSITIONS_PER_PAGE)
