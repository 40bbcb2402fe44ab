"""What routers wish to run and where they hear of it. Knows streams and last words; not what a request goes through."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from common.errors import DuplicateRequest, ServingError
from common.types import RequestContext
from services.decode.commits import Outbox, UncommittedRounds
from services.decode.events import Event, Failed, Finished
from services.decode.reservations import Reservation
from services.decode.trace import RequestTrace

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Admission:
    """A router's wish to run a reservation."""

    reservation: Reservation
    context: RequestContext
    outbox: Outbox
    rounds: UncommittedRounds
    """Of the context as it was admitted; begun anew when the request runs, which may be a first token later."""
    trace: RequestTrace


class Admissions:
    """One admission at most for each reservation, from the router's Admit until the router is told of the end."""

    def __init__(self) -> None:
        self._by_id: dict[str, Admission] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, reservation: Reservation) -> bool:
        return reservation.reservation_id in self._by_id

    def __getitem__(self, reservation: Reservation) -> Admission:
        return self._by_id[reservation.reservation_id]

    def is_known(self, reservation: Reservation, outbox: Outbox) -> bool:
        """Whether this stream has admitted the reservation already. Raises DuplicateRequest when another one has."""
        known = self._by_id.get(reservation.reservation_id)
        if known is not None and known.outbox is not outbox:
            raise DuplicateRequest(
                f"request {known.context.request_id!r} was admitted by another stream"
            )
        return known is not None

    def add(self, admission: Admission) -> None:
        """Take an admission that is not known yet."""
        self._by_id[admission.reservation.reservation_id] = admission

    def of_stream(self, outbox: Outbox, reservation: Reservation) -> Admission | None:
        """What a stream has admitted; None when it was nobody, or another one."""
        admission = self._by_id.get(reservation.reservation_id)
        return None if admission is None or admission.outbox is not outbox else admission

    def all_of_stream(self, outbox: Outbox) -> list[Admission]:
        return [admission for admission in self._by_id.values() if admission.outbox is outbox]

    def end(self, reservation: Reservation, error: ServingError | None) -> None:
        """Forget an admission and tell its router of the end; None is an end as told. Nobody is told without one."""
        admission = self._by_id.pop(reservation.reservation_id, None)
        if admission is not None:
            admission.outbox.put(_last_event(reservation, error))
            admission.trace.ended(error)
            _log_end(reservation, admission, error)


def _last_event(reservation: Reservation, error: ServingError | None) -> Event:
    if error is None:
        return Finished(request_id=reservation.request_id, epoch=reservation.epoch)
    return Failed(request_id=reservation.request_id, epoch=reservation.epoch, error=error)


def _log_end(reservation: Reservation, admission: Admission, error: ServingError | None) -> None:
    logger.debug(
        "request ended",
        extra={
            "request_id": reservation.request_id,
            "epoch": reservation.epoch,
            "rounds": admission.rounds.last_round,
            "committed_length": admission.rounds.committed_length,
            "outcome": "finished" if error is None else error.reason,
            **({"cause": error.message} if error is not None else {}),
            **admission.trace.ids(),
        },
    )
