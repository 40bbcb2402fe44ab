"""Whether a request whose worker failed is placed again. Knows errors and counts; never sees a worker."""

from __future__ import annotations

from collections import Counter

from common.errors import (
    CapacityExhausted,
    ContractMismatch,
    ErrorKind,
    RequestNotFound,
    ServingError,
)

_WORKER_FAULTS = frozenset(
    {ErrorKind.UNAVAILABLE, ErrorKind.INTERNAL, ErrorKind.ABORTED, ErrorKind.CANCELLED}
)


class Failures:
    """What went wrong with the placements of one request."""

    def __init__(self) -> None:
        self.blame: Counter[str] = Counter()
        """By address: 2 for each time that the request failed there, 1 when it was there or at one other."""
        self._pairs: set[frozenset[str]] = set()
        """Of addresses between which it failed."""
        self._num_faults = 0
        self._overloaded_since: float | None = None

    def was_between(self, prefill: str, decode: str) -> bool:
        """Whether a hand-off from one to the other failed."""
        return frozenset({prefill, decode}) in self._pairs

    def note(
        self,
        error: ServingError,
        workers: frozenset[str],
        *,
        now: float,
        max_attempts: int,
        patience_s: float,
    ) -> None:
        """Count a failed placement; returning means that the request may be placed again.

        `workers` has one address, or two when the fault is one's or the other's or lies between them. A fault counts
        against `max_attempts`. Overload is no fault: it is waited out, `patience_s` from its first sight. Raises
        `error` when it is the client's own or when this was enough.
        """
        self.blame.update(dict.fromkeys(workers, 2 if len(workers) == 1 else 1))
        if len(workers) > 1:
            self._pairs.add(workers)
        if isinstance(error, CapacityExhausted):
            self._overloaded_since = (
                now if self._overloaded_since is None else self._overloaded_since
            )
            if now - self._overloaded_since > patience_s:
                raise error
            return
        if not is_workers_fault(error):
            raise error
        self._num_faults += 1
        if self._num_faults >= max_attempts:
            raise error


def is_workers_fault(error: ServingError) -> bool:
    """Whether the same request may go well on another worker, or on the same one a moment later."""
    # A reservation that its worker does not know has ended, or the worker was restarted. While a deployment is replaced, two
    # workers may not match; others do.
    return error.kind in _WORKER_FAULTS or isinstance(error, RequestNotFound | ContractMismatch)
