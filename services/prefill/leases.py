"""Finished state that is kept for a while. Knows rooms and deadlines; no rows."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from common.engine.memory import RequestMemory


@dataclass(slots=True, kw_only=True)
class Lease:
    """The room of a request whose state was handed over."""

    lease_id: str
    memory: RequestMemory
    expires_at: float


class Leases:
    """All leases of a worker, oldest first. Each ends once: by release, by expiry, or because its room is needed."""

    def __init__(self, *, lease_s: float, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self.num_expired = 0
        self._clock = clock
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, memory: RequestMemory) -> Lease:
        """Keep a room; it is the lease's from now on."""
        lease = Lease(
            lease_id=secrets.token_hex(8),
            memory=memory,
            expires_at=self._clock() + self.lease_s,
        )
        self._leases[lease.lease_id] = lease
        return lease

    def renew(self, lease_id: str) -> bool:
        """Let a lease begin anew; False when it has ended."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.expires_at = self._clock() + self.lease_s
        return True

    def release(self, lease_id: str) -> bool:
        """Free a lease's room; False when it has ended already."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        lease.memory.release()
        return True

    def expire(self) -> int:
        """Free what is overdue; returns how many."""
        now = self._clock()
        overdue = [lease.lease_id for lease in self._leases.values() if lease.expires_at <= now]
        for lease_id in overdue:
            self.release(lease_id)
        self.num_expired += len(overdue)
        return len(overdue)

    def release_oldest(self) -> bool:
        """Free the lease that would end first; False when there is none."""
        if not self._leases:
            return False
        oldest = min(self._leases.values(), key=lambda lease: lease.expires_at)
        return self.release(oldest.lease_id)
