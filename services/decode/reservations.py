"""Room that is promised to requests, and who may write into it. Knows pages, secrets and deadlines; no tensors.

A reservation goes RESERVED → RECEIVING → READY → RUNNING → RELEASED, or through ABORTING to RELEASED from anywhere; with
QUARANTINED between the two when a sender may still write. Its memory is given back in RELEASED and never earlier.
"""

from __future__ import annotations

import asyncio
import enum
import hmac
import secrets
from collections.abc import Callable

from common.engine.memory import Memory, RequestMemory
from common.errors import CapabilityRefused, DuplicateRequest, InvalidRequest, RequestNotFound
from common.types import RequestId


class ReservationState(enum.Enum):
    RESERVED = "reserved"
    RECEIVING = "receiving"
    READY = "ready"
    RUNNING = "running"
    ABORTING = "aborting"
    QUARANTINED = "quarantined"
    RELEASED = "released"


_NEXT = {
    # A worker that computes prompts itself goes from RESERVED to RUNNING.
    ReservationState.RESERVED: {
        ReservationState.RECEIVING,
        ReservationState.RUNNING,
        ReservationState.ABORTING,
    },
    ReservationState.RECEIVING: {ReservationState.READY, ReservationState.ABORTING},
    ReservationState.READY: {ReservationState.RUNNING, ReservationState.ABORTING},
    ReservationState.RUNNING: {ReservationState.ABORTING},
    ReservationState.ABORTING: {ReservationState.QUARANTINED, ReservationState.RELEASED},
    ReservationState.QUARANTINED: {ReservationState.RELEASED},
    ReservationState.RELEASED: set[ReservationState](),
}


class Reservation:
    """One request's room in one epoch."""

    def __init__(
        self,
        *,
        request_id: RequestId,
        epoch: int,
        num_tokens: int,
        max_length: int,
        memory: RequestMemory,
        expires_at: float,
        reserved_at: float,
    ) -> None:
        self.reservation_id = secrets.token_hex(8)
        self.capability = secrets.token_bytes(32)
        self.request_id = request_id
        self.epoch = epoch
        self.num_tokens = num_tokens
        self.max_length = max_length
        self.memory = memory
        self.expires_at = expires_at
        self.reserved_at = reserved_at
        self.left = asyncio.Event()
        """Set when the request is over here, so that a newer epoch may come. Its memory may still be in quarantine."""
        self._state = ReservationState.RESERVED

    @property
    def state(self) -> ReservationState:
        return self._state

    @property
    def has_ended(self) -> bool:
        return self._state in (
            ReservationState.ABORTING,
            ReservationState.QUARANTINED,
            ReservationState.RELEASED,
        )

    def move(self, state: ReservationState) -> None:
        """Take the next state."""
        assert state in _NEXT[self._state], f"{self.reservation_id}: {self._state} to {state}"
        self._state = state


class Reservations:
    """All live reservations of a worker."""

    def __init__(self, memory: Memory, *, lifetime_s: float, clock: Callable[[], float]) -> None:
        self.lifetime_s = lifetime_s
        self._memory = memory
        self._clock = clock
        self._by_id: dict[str, Reservation] = {}
        self._by_request: dict[RequestId, Reservation] = {}
        self._quarantined: set[Reservation] = set()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def is_empty(self) -> bool:
        """Whether no memory is held, quarantine included."""
        return self._emptied.is_set()

    def num_in(self, *states: ReservationState) -> int:
        # Asked by other threads too, which must not see the table change under them.
        return sum(r.state in states for r in tuple(self._by_id.values()))

    def reserve(
        self, request_id: RequestId, epoch: int, *, num_tokens: int, max_length: int
    ) -> Reservation:
        """Set room aside; a repeated question gets the same answer.

        The caller has ended older epochs before. Raises CapacityExhausted, nothing being held then, DuplicateRequest
        when the request is beyond being reserved, and RequestNotFound when it lives in a newer epoch.
        """
        known = self._by_request.get(request_id)
        if known is not None:
            return self._again(known, epoch, num_tokens, max_length)
        if not 0 < num_tokens < max_length:
            raise InvalidRequest(
                f"{num_tokens} tokens of at most {max_length} leave nothing to generate"
            )
        reservation = Reservation(
            request_id=request_id,
            epoch=epoch,
            num_tokens=num_tokens,
            max_length=max_length,
            memory=self._memory.reserve(max_length),
            expires_at=self._clock() + self.lifetime_s,
            reserved_at=self._clock(),
        )
        self._by_id[reservation.reservation_id] = reservation
        self._by_request[request_id] = reservation
        self._emptied.clear()
        return reservation

    def authorize(
        self, request_id: RequestId, epoch: int, reservation_id: str, capability: bytes
    ) -> Reservation:
        """The live reservation that a message belongs to.

        Raises RequestNotFound when there is none or the epoch is another, CapabilityRefused when the secret is wrong.
        """
        reservation = self._by_id.get(reservation_id)
        if (
            reservation is None
            or reservation.has_ended
            or reservation.request_id != request_id
            or reservation.epoch != epoch
        ):
            raise RequestNotFound(
                f"there is no reservation {reservation_id!r} of request {request_id!r} in epoch {epoch}"
            )
        if not hmac.compare_digest(reservation.capability, capability):
            raise CapabilityRefused(
                f"the capability is not that of reservation {reservation_id!r} in epoch {epoch}"
            )
        return reservation

    def find(self, request_id: RequestId) -> Reservation | None:
        """The live reservation of a request, whatever its epoch."""
        return self._by_request.get(request_id)

    def by_id(self, reservation_id: str) -> Reservation | None:
        return self._by_id.get(reservation_id)

    def all(self) -> list[Reservation]:
        return list(self._by_id.values())

    def touch(self, reservation: Reservation) -> None:
        """Something was heard of it: its time begins anew."""
        reservation.expires_at = self._clock() + self.lifetime_s

    def expired(self) -> list[Reservation]:
        """Reservations that wait for a peer which has gone silent. Running ones wait for nobody."""
        now = self._clock()
        waiting = (ReservationState.RESERVED, ReservationState.RECEIVING, ReservationState.READY)
        return [r for r in self._by_id.values() if r.state in waiting and r.expires_at <= now]

    def quarantine(self, reservation: Reservation) -> None:
        """The request is over, but a peer may still write to its memory: keep that until `release`."""
        reservation.move(ReservationState.QUARANTINED)
        self._quarantined.add(reservation)
        self._leave(reservation)

    def release(self, reservation: Reservation) -> None:
        """Give the memory back. Nothing may write to it or read from it any more."""
        was_quarantined = reservation.state is ReservationState.QUARANTINED
        reservation.move(ReservationState.RELEASED)
        reservation.memory.release()
        if was_quarantined:
            self._quarantined.remove(reservation)
        else:
            self._leave(reservation)
        if not self._by_id and not self._quarantined:
            self._emptied.set()

    async def wait_empty(self) -> None:
        """Return once no memory is held, quarantine included. The caller sets the deadline."""
        await self._emptied.wait()

    def check_integrity(self) -> None:
        self._memory.check_integrity()
        held = self._memory.num_slots - self._memory.num_free_slots
        num_known = len(self._by_id) + len(self._quarantined)
        assert held == num_known, f"{held} slots are held by {num_known} reservations"
        assert len(self._by_id) == len(self._by_request), "a request has two reservations"
        for r in self._by_id.values():
            assert r.state is not ReservationState.RELEASED, (
                f"{r.reservation_id} is released but known"
            )
        if not num_known:
            memory = self._memory
            assert memory.num_free_pages == memory.num_pages, (
                f"{memory.num_free_pages=} {memory.num_pages=} at rest"
            )

    def _leave(self, reservation: Reservation) -> None:
        del self._by_id[reservation.reservation_id]
        del self._by_request[reservation.request_id]
        reservation.left.set()

    def _again(
        self, known: Reservation, epoch: int, num_tokens: int, max_length: int
    ) -> Reservation:
        if epoch < known.epoch:
            raise RequestNotFound(
                f"request {known.request_id!r} is in epoch {known.epoch}, not {epoch}"
            )
        is_same = (epoch, num_tokens, max_length) == (
            known.epoch,
            known.num_tokens,
            known.max_length,
        )
        if is_same and known.state is ReservationState.RESERVED:
            self.touch(known)
            return known
        raise DuplicateRequest(
            f"request {known.request_id!r} has a reservation in epoch {known.epoch} already, {known.state.value}"
        )
