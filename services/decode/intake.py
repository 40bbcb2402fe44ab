"""The receiving side of hand-offs: terms, bytes and their end. Knows rows and who may write them; never runs a request."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from common.errors import (
    ContractMismatch,
    DuplicateRequest,
    InvalidRequest,
    RequestNotFound,
    ServingError,
    TransferFailed,
)
from common.kv_cache.layout import num_pages_for
from common.rpc.transfer_stream import Write
from common.telemetry.metrics import TransferMetrics
from common.transfer.grant import WriteGrant
from common.transfer.handoff import (
    HandoffKey,
    HandoffOffer,
    HandoffResult,
    HandoffTerms,
)
from common.transfer.manifest import ManifestEntry
from common.transfer.memory import PoolMemory
from services.decode.arrivals import Arrivals
from services.decode.incoming import Incoming
from services.decode.meetings import Meetings
from services.decode.quarantine import Writer
from services.decode.reservations import Reservation, Reservations, ReservationState
from services.decode.wholeness import WholenessCheck, require_well_formed

logger = logging.getLogger(__name__)


class Intake:
    """All hand-offs into one worker.

    `on_ready` and `on_failed` are told at most once per reservation; whoever ends a reservation calls `forget`.
    """

    def __init__(
        self,
        *,
        reservations: Reservations,
        memory: PoolMemory,
        meetings: Meetings,
        metrics: TransferMetrics,
        on_ready: Callable[[Reservation], None],
        on_failed: Callable[[Reservation, ServingError], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._reservations = reservations
        self._memory = memory
        self._meetings = meetings
        self._metrics = metrics
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._check = WholenessCheck(
            memory=memory,
            meetings=meetings,
            metrics=metrics,
            counts=self.counts,
            on_failed=on_failed,
        )
        self._incoming: dict[str, Incoming] = {}

    def negotiate(self, key: HandoffKey, capability: bytes, offer: HandoffOffer) -> HandoffTerms:
        """Agree on a hand-off and say where its bytes go; a repeated question gets the same answer.

        Raises PairUnknown when the sender must introduce itself first, ContractMismatch that names the field and both
        values; the reservation is untouched then.
        """
        reservation = self._authorize(key, capability)
        known = self._incoming.get(key.reservation_id)
        if known is not None:
            self._require_same(known, key)
            return known.terms
        engine = self._meetings.require_met(key, offer)
        # State from a lease is shorter than a context that went on since.
        if not 0 < offer.num_tokens <= reservation.num_tokens:
            raise ContractMismatch(
                f"num_tokens is {reservation.num_tokens} in the reservation but {offer.num_tokens} at prefill",
                metadata={"field": "num_tokens"},
            )
        reservation.move(ReservationState.RECEIVING)
        self._reservations.touch(reservation)
        # Pages beyond the prompt belong to the request too, but nobody else writes them.
        pages = tuple(reservation.memory.take_all()[: num_pages_for(offer.num_tokens)])
        terms = HandoffTerms(
            page_ids=pages,
            slot=reservation.memory.slot,
            generation=self._meetings.generation,
        )
        destination = self._memory.placement(page_ids=pages, slot=reservation.memory.slot)
        self._incoming[key.reservation_id] = Incoming(
            key=key,
            terms=terms,
            destination=destination,
            arrivals=Arrivals(self._memory, destination, offer.num_tokens),
            engine=engine,
            num_tokens=offer.num_tokens,
            sender_address=offer.sender_address,
            stop_receiving=engine.receive(),
        )
        return terms

    def writer(self, key: HandoffKey, capability: bytes) -> Write:
        """What puts bytes of a hand-off into memory, range by range, as long as it is being received.

        The writer raises InvalidRequest for a range that was not granted and TransferFailed once nothing may come.
        """
        reservation = self._authorize(key, capability)
        incoming = self._find(key)
        grant = WriteGrant(self._memory.layout, incoming.destination)

        def write(region: int, offset: int, payload: memoryview) -> None:
            if reservation.state is not ReservationState.RECEIVING:
                raise TransferFailed(
                    f"reservation {reservation.reservation_id} is {reservation.state.value} and takes no more bytes"
                )
            try:
                grant.require(region, offset, len(payload))
            except InvalidRequest as error:
                self.counts["refused_writes"] += 1
                logger.warning("hand-off of request %s: %s", key.request_id, error)
                raise
            self._memory.write(region, offset, payload)
            self._reservations.touch(reservation)
            self.counts["received_bytes"] += len(payload)

        return write

    async def arrived(
        self, key: HandoffKey, capability: bytes, entries: Sequence[ManifestEntry]
    ) -> None:
        """Rows have arrived, others will: what is digested now is not waited for in the end.

        Raises InvalidRequest when they do not follow those that arrived before.
        """
        self._authorize(key, capability)
        incoming = self._find(key)
        async with incoming.check:
            # What comes for the second time is looked at when all of it is there.
            if incoming.result is None and not incoming.num_mismatches:
                await incoming.arrivals.take(entries)

    async def complete(self, key: HandoffKey, capability: bytes, result: HandoffResult) -> bool:
        """Check that everything came and hold the request ready; False asks for all bytes once more.

        Raises TransferFailed when rows are missing or the second try differs too, and InvalidRequest when the manifest is
        malformed; the reservation is given up then.
        """
        reservation = self._authorize(key, capability)
        incoming = self._find(key)
        require_well_formed(result)
        async with incoming.check:
            if incoming.result is not None:
                return True
            incoming.may_be_written = False
            is_whole = await self._check.is_whole(reservation, incoming, result)
            if reservation.has_ended:
                raise RequestNotFound(f"request {key.request_id!r} was ended during its hand-off")
            incoming.may_be_written = not is_whole
            if is_whole:
                incoming.stop_receiving()
                incoming.result = result
                self._count_received(incoming, result)
                reservation.move(ReservationState.READY)
                self._reservations.touch(reservation)
                self._on_ready(reservation)
            return is_whole

    def abort(self, key: HandoffKey, capability: bytes, reason: str) -> Reservation | None:
        """The sender gave a hand-off up and writes no more. None when there is nothing to end.

        State that was accepted as whole is not the sender's any more and stays.
        """
        try:
            reservation = self._authorize(key, capability)
        except RequestNotFound:
            return None
        incoming = self._incoming.get(key.reservation_id)
        if incoming is not None:
            self._require_same(incoming, key)
            if incoming.result is not None:
                return None
            incoming.may_be_written = False
        self._on_failed(reservation, TransferFailed(f"the prefill worker gave up: {reason}"))
        return reservation

    def digest_s(self, key: HandoffKey) -> float:
        """How long the last Complete of a hand-off waited for digests; 0 when it is over."""
        incoming = self._incoming.get(key.reservation_id)
        return 0.0 if incoming is None else incoming.digest_s

    def engine_of(self, reservation: Reservation) -> str:
        """Name of the engine that carried a hand-off that is still known."""
        return self._incoming[reservation.reservation_id].engine.name

    def drafter_difference(self, reservation: Reservation) -> str:
        """Why a hand-off that is still known brought no drafter state, when it is because of who sent it."""
        return self._meetings.drafter_difference(self._incoming[reservation.reservation_id].key)

    def result_of(self, reservation: Reservation) -> HandoffResult:
        """What arrived for a reservation that is READY."""
        result = self._incoming[reservation.reservation_id].result
        assert result is not None, f"{reservation.reservation_id} is {reservation.state}"
        return result

    def num_received(self, reservation: Reservation) -> int:
        """Positions whose state arrived for a reservation that is READY."""
        return self._incoming[reservation.reservation_id].num_tokens

    def forget(self, reservation: Reservation) -> Writer | None:
        """The reservation has ended. Its memory is free for others unless a sender is returned that may still write.

        Bytes that come through us are refused from the reservation's change of state on; a one-sided engine asks nobody.
        """
        incoming = self._incoming.pop(reservation.reservation_id, None)
        if incoming is None:
            return None
        if incoming.may_be_written and incoming.engine.is_one_sided:
            return Writer(
                key=incoming.key,
                address=incoming.sender_address,
                stop_receiving=incoming.stop_receiving,
            )
        if incoming.result is None:
            incoming.stop_receiving()
        return None

    def _count_received(self, incoming: Incoming, result: HandoffResult) -> None:
        engine = incoming.engine.name
        num_bytes = sum(entry.num_bytes for entry in result.manifest)
        self._metrics.received_bytes.labels(engine=engine).inc(num_bytes)
        seconds = time.monotonic() - incoming.negotiated_at
        self._metrics.receive_duration.labels(engine=engine).observe(seconds)

    def _authorize(self, key: HandoffKey, capability: bytes) -> Reservation:
        try:
            return self._reservations.authorize(
                key.request_id, key.epoch, key.reservation_id, capability
            )
        except ServingError as error:
            self.counts[f"refused_{error.reason.lower()}"] += 1
            raise

    def _find(self, key: HandoffKey) -> Incoming:
        incoming = self._incoming.get(key.reservation_id)
        if incoming is None:
            raise RequestNotFound(f"no hand-off of request {key.request_id!r} was negotiated")
        self._require_same(incoming, key)
        return incoming

    def _require_same(self, incoming: Incoming, key: HandoffKey) -> None:
        if incoming.key != key:
            raise DuplicateRequest(
                f"reservation {key.reservation_id!r} receives from prefill generation "
                f"{incoming.key.prefill_generation!r}, not {key.prefill_generation!r}"
            )
