"""Placement: which worker a request should try first. A pure function of what the router knows of its workers."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

NOBODY: Mapping[str, int] = MappingProxyType({})


class WorkerState(enum.Enum):
    """Whether a worker can be used, as this router sees it."""

    UNKNOWN = "unknown"
    """Never heard of."""
    READY = "ready"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What placement looks at."""

    address: str
    state: WorkerState
    model_fingerprint: str
    pending_tokens: int
    """Tokens that this router's requests on the worker may still need."""
    running_requests: int
    """Requests that this router placed on it."""


def rank(
    workers: Iterable[WorkerLoad], *, model_fingerprint: str, blame: Mapping[str, int] = NOBODY
) -> list[str]:
    """Addresses of usable workers, the one to try first in front.

    Fewest pending tokens come first, then fewest requests, then the order of the configuration. Addresses with `blame`
    for what the request has suffered come after all others, the most blamed last: one bad worker of two is passed by,
    an only worker that has come back is used.
    """
    usable = [
        worker
        for worker in workers
        if worker.state is WorkerState.READY and worker.model_fingerprint == model_fingerprint
    ]
    usable.sort(key=lambda w: (blame.get(w.address, 0), w.pending_tokens, w.running_requests))
    return [worker.address for worker in usable]
