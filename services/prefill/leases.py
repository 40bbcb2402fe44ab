"""Finished state that is kept for a while. Knows rooms, readers and deadlines; no rows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.engine.memory import RequestMemory
from common.errors import LeaseEnded
from services.prefill.loop import PromptFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedState:
    """What a prefill came to, rows apart."""

    tokens: tuple[int, ...]
    """Those whose rows are there."""
    finished: PromptFinished
    """What follows them."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """The room of a request whose state was handed over."""

    lease_id: str
    memory: RequestMemory
    state: FinishedState
    expires_at: float
    num_readers: int = 0
    """Hand-offs that read the room; it is not given back before they end."""
    has_ended: bool = False


class Leases:
    """All leases of a worker, oldest first. Each ends once: by release, by expiry, or because its room is needed.

    The room of an ended lease is free as soon as nobody reads it.
    """

    def __init__(
        self,
        *,
        lease_s: float,
        clock: Callable[[], float],
        on_ended: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`on_ended` hears of every lease's end, "released", "expired" or "evicted"."""
        self.lease_s = lease_s
        self.num_expired = 0
        self._clock = clock
        self._on_ended = on_ended
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, memory: RequestMemory, state: FinishedState, *, lease_id: str = "") -> Lease:
        """Keep a room; it is the lease's from now on. An id that is empty or in use is replaced by a new one."""
        if not lease_id or lease_id in self._leases:
            lease_id = secrets.token_hex(8)
        lease = Lease(
            lease_id=lease_id,
            memory=memory,
            state=state,
            expires_at=self._clock() + self.lease_s,
        )
        self._leases[lease.lease_id] = lease
        return lease

    def renew(self, lease_ids: Iterable[str]) -> list[str]:
        """Let leases begin anew; returns those that have ended."""
        ended = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None:
                ended.append(lease_id)
            else:
                lease.expires_at = self._clock() + self.lease_s
        return ended

    def open(self, lease_id: str) -> Lease:
        """Read a lease's room, beside other readers, until `close`. Raises LeaseEnded."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseEnded(f"there is no lease {lease_id!r} here, or no longer")
        self.renew([lease_id])
        lease.num_readers += 1
        return lease

    def close(self, lease: Lease) -> None:
        """The reader has certainly stopped reading; the last one of an ended lease frees the room."""
        assert lease.num_readers > 0, f"lease {lease.lease_id} has no reader"
        lease.num_readers -= 1
        self._free_unread(lease)

    def release(self, lease_id: str) -> bool:
        """End a lease; False when it has ended already."""
        return self._end(lease_id, "released")

    def expire(self) -> int:
        """End what is overdue; returns how many."""
        now = self._clock()
        overdue = [lease.lease_id for lease in self._leases.values() if lease.expires_at <= now]
        for lease_id in overdue:
            self._end(lease_id, "expired")
        self.num_expired += len(overdue)
        return len(overdue)

    def unread(self, group: int) -> list[Lease]:
        """Leases whose rooms, in this data parallel group, can be freed now; first the one that would end first."""
        unread = [
            lease
            for lease in self._leases.values()
            if not lease.num_readers and lease.memory.group == group
        ]
        return sorted(unread, key=lambda lease: lease.expires_at)

    def evict(self, lease: Lease) -> None:
        """End a lease that nobody reads, because its room is needed."""
        self._end(lease.lease_id, "evicted")

    def _end(self, lease_id: str, why: str) -> bool:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        lease.has_ended = True
        self._free_unread(lease)
        self._on_ended(why)
        return True

    def _free_unread(self, lease: Lease) -> None:
        if lease.has_ended and not lease.num_readers:
            lease.memory.release()
