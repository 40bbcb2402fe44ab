"""One placement of a request: two workers, one inbox. Knows events; never decides what is committed."""

from __future__ import annotations

import asyncio

from common.errors import ContractMismatch, ServingError, TransferFailed
from services.router.commits import Committed, Round
from services.router.decode_link import DecodeSession
from services.router.decode_worker import DecodeWorker
from services.router.events import Admitted, Event, Failed, FirstToken, HandedOff
from services.router.prefill_worker import PrefillWorker

CAUSE_TIMEOUT_S = 0.5

AttemptEvent = FirstToken | HandedOff | Admitted | Round


class AttemptFailed(Exception):
    """A worker failed under a running request. Stays inside the router, which may place the request again."""

    def __init__(
        self,
        error: ServingError,
        worker: str,
        *,
        between: tuple[PrefillWorker, DecodeWorker] | None = None,
    ) -> None:
        """`worker` said so, or is gone; `between` are the two workers of which either may be to blame."""
        super().__init__(f"{worker}: {error.message}")
        self.error = error
        self.worker = worker
        self.between = between
        self.suspects = frozenset({worker, *(each.address for each in between or ())})


class Attempt:
    """A request's events from both of its workers in the order of their arrival, and the way to answer them."""

    def __init__(
        self,
        inbox: asyncio.Queue[Event],
        session: DecodeSession,
        *,
        decode: DecodeWorker,
        prefill: PrefillWorker | None,
        is_from_lease: bool,
    ) -> None:
        self.decode = decode
        self.prefill = prefill
        """None when decode computes the prompt."""
        self.is_from_lease = is_from_lease
        """Whether prefill hands over what it has instead of computing it."""
        self.epoch = session.key[1]
        self._inbox = inbox
        self._session = session
        self._is_admitted = False

    async def next_event(self) -> AttemptEvent:
        """Raises AttemptFailed when a worker gave up or is gone. The request's deadline bounds the wait."""
        while True:
            event = await self._inbox.get()
            if not isinstance(event, Failed):
                self._is_admitted |= isinstance(event, Admitted)
                return event
            if event.role == "prefill" and self._is_admitted:
                continue  # decode has everything: a prefill worker that dies now takes only its lease along
            cause = await self._cause(event)
            raise AttemptFailed(cause.error, cause.worker, between=self._between(cause.error))

    async def _cause(self, failed: Failed) -> Failed:
        """When prefill gives a hand-off up, decode hears of it first, but only prefill knows why."""
        if self.prefill is None or not isinstance(failed.error, TransferFailed):
            return failed
        if failed.role == "prefill":
            return failed
        try:
            async with asyncio.timeout(CAUSE_TIMEOUT_S):
                while True:
                    event = await self._inbox.get()
                    if isinstance(event, Failed) and event.role == "prefill":
                        return event
        except TimeoutError:
            return failed

    def _between(self, error: ServingError) -> tuple[PrefillWorker, DecodeWorker] | None:
        """A hand-off fails between two workers, whichever of them tells of it, and two that do not match may match others."""
        if self.prefill is None or not isinstance(error, TransferFailed | ContractMismatch):
            return None
        return self.prefill, self.decode

    def confirm(self, committed: Committed) -> None:
        """Tell decode what was committed. A request that ends before its first round is simply left, and so aborted."""
        if committed.round > 0:
            self._session.commit(
                round_number=committed.round,
                length=committed.length,
                finish=committed.finish is not None,
            )
