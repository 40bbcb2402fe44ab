"""How a request ends, whatever its state: who stops, when its memory is free, who is told. Knows the order of that only."""

from __future__ import annotations

import asyncio

from common.errors import RequestAborted, ServingError, WorkerLost
from common.types import RequestId
from services.decode.admissions import Admissions
from services.decode.intake import Intake
from services.decode.quarantine import Quarantine
from services.decode.reservations import Reservation, Reservations, ReservationState
from services.decode.runs import Runs

END_TIMEOUT_S = 5.0
"""For a request that was told to end: it waits for a step of the engine."""


class Endings:
    """Ends each reservation of a worker once."""

    def __init__(
        self,
        *,
        reservations: Reservations,
        intake: Intake,
        quarantine: Quarantine,
        runs: Runs,
        admissions: Admissions,
    ) -> None:
        self._reservations = reservations
        self._intake = intake
        self._quarantine = quarantine
        self._runs = runs
        self._admissions = admissions
        self._waiting: set[asyncio.Task[None]] = set()

    def end(self, reservation: Reservation, error: ServingError | None) -> None:
        """Stop a request, free its memory, then tell its router; nothing happens when it has ended. None is an end as told.

        Memory that its sender may still write to is not freed but put into quarantine; that of a request that runs is
        freed when the engine has let go of it.
        """
        if reservation.has_ended:
            return
        is_running = reservation.state is ReservationState.RUNNING
        reservation.move(ReservationState.ABORTING)
        writer = self._intake.forget(reservation)
        if writer is not None:
            self._quarantine.hold(reservation, writer)
            self._admissions.end(reservation, error)
        elif is_running:
            self._runs.count_end(reservation)
            ending = asyncio.create_task(self._release_running(reservation, error))
            self._waiting.add(ending)
            ending.add_done_callback(self._waiting.discard)
        else:
            self._release(reservation, error)

    async def end_older(self, request_id: RequestId, epoch: int) -> None:
        """End a request in an epoch before this one; returns when it is over here. Raises WorkerLost when it does not end."""
        older = self._reservations.find(request_id)
        if older is None or older.epoch >= epoch:
            return
        self.end(older, RequestAborted(f"request {request_id!r} was placed again"))
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await older.left.wait()
        except TimeoutError:
            raise WorkerLost(
                f"epoch {older.epoch} of request {request_id!r} does not end"
            ) from None

    async def wait(self) -> None:
        """Return when the engine has let go of all that were ended before."""
        if self._waiting:
            await asyncio.wait(tuple(self._waiting))

    async def _release_running(self, reservation: Reservation, error: ServingError | None) -> None:
        await self._runs.remove(reservation)
        self._release(reservation, error)

    def _release(self, reservation: Reservation, error: ServingError | None) -> None:
        self._reservations.release(reservation)
        self._admissions.end(reservation, error)
