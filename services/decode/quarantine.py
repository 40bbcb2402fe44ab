"""Memory of ended hand-offs that their senders may still write to. Knows reservations and keys; never reuses a page."""

from __future__ import annotations

import asyncio
import enum
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from common.errors import CapabilityRefused
from common.transfer.handoff import HandoffKey
from services.decode.reservations import Reservation, Reservations

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A sender that may still write into a reservation's memory."""

    key: HandoffKey
    address: str
    """Where it can be asked; empty when it did not say."""
    stop_receiving: Callable[[], None]
    """To be called once nothing more can come in."""


class SenderState(enum.Enum):
    """What is known of a sender that should stop."""

    UNKNOWN = "unknown"
    """It may be writing."""
    STOPPED = "stopped"
    """It says that it writes nothing any more, and that everything it wrote has arrived."""
    GONE = "gone"
    """Its process has certainly ended. What it had sent may still be on its way through our own engine."""


SETTLE_S = 0.5
"""What a process that is gone had sent is in memory by then: it has only to be taken off this host's own sockets."""


@dataclass(slots=True, kw_only=True)
class Quarantined:
    reservation: Reservation
    writer: Writer
    gone_since: float | None = None
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Quarantine:
    """A reservation enters when it ends during a one-sided write, and leaves when its sender has stopped.

    That is so when the sender says it, of its own accord or because it is asked, or is proven gone. Silence proves nothing,
    however long it lasts.
    """

    def __init__(
        self,
        reservations: Reservations,
        ask_sender: Callable[[Writer, bytes], Awaitable[SenderState]],
        *,
        clock: Callable[[], float],
    ) -> None:
        """`ask_sender` has a writer stop, by the capability of its reservation, and says what came of it."""
        self._clock = clock
        self._reservations = reservations
        self._ask_sender = ask_sender
        self._held: dict[str, Quarantined] = {}
        self._asking: set[asyncio.Task[None]] = set()

    @property
    def num_pages(self) -> int:
        return sum(len(held.reservation.memory.block_table) for held in tuple(self._held.values()))

    def hold(self, reservation: Reservation, writer: Writer) -> None:
        """Take a reservation that is ABORTING, and ask its sender to stop."""
        self._reservations.quarantine(reservation)
        self._held[reservation.reservation_id] = Quarantined(reservation=reservation, writer=writer)
        logger.info(
            "request %s: %d pages are in quarantine until %s has stopped writing",
            reservation.request_id,
            len(reservation.memory.block_table),
            writer.address or "the sender",
        )
        asking = asyncio.create_task(self._ask(reservation.reservation_id))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    def acknowledge(self, key: HandoffKey, capability: bytes) -> None:
        """The sender says that it writes no more. Ignored for hand-offs that are not here; raises CapabilityRefused."""
        held = self._held.get(key.reservation_id)
        if held is None or held.writer.key != key:
            return
        if not hmac.compare_digest(held.reservation.capability, capability):
            raise CapabilityRefused(
                f"the capability is not that of reservation {key.reservation_id!r}"
            )
        self._leave(held)

    async def ask_all(self) -> None:
        """Ask every sender again. Called every second or so; takes a few seconds at most."""
        await asyncio.gather(*(self._ask(reservation_id) for reservation_id in list(self._held)))

    async def close(self) -> None:
        """Ask nobody any more; what is here ends with the process."""
        for asking in tuple(self._asking):
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    async def _ask(self, reservation_id: str) -> None:
        held = self._held.get(reservation_id)
        if held is None:
            return
        async with held.asking:
            if reservation_id not in self._held:
                return
            state = await self._ask_sender(held.writer, held.reservation.capability)
            if state is SenderState.STOPPED or self._has_settled(held, state):
                self._leave(held)

    def _has_settled(self, held: Quarantined, state: SenderState) -> bool:
        if state is not SenderState.GONE:
            return False
        if held.gone_since is None:
            held.gone_since = self._clock()
        return self._clock() - held.gone_since >= SETTLE_S

    def _leave(self, held: Quarantined) -> None:
        if self._held.pop(held.reservation.reservation_id, None) is not None:
            held.writer.stop_receiving()
            self._reservations.release(held.reservation)
            logger.info("request %s left quarantine", held.reservation.request_id)
