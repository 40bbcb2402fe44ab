"""The receiving side of hand-offs: terms, bytes, and the check that all of them came. Knows rows; never runs a request."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
from common.transfer.digest import digest_rows
from common.transfer.engine import TransferEngine
from common.transfer.grant import WriteGrant
from common.transfer.handoff import (
    CacheContract,
    HandoffKey,
    HandoffOffer,
    HandoffResult,
    HandoffTerms,
)
from common.transfer.manifest import require_complete
from common.transfer.memory import PoolMemory
from common.transfer.plan import live_rows
from services.decode.reservations import Reservation, Reservations, ReservationState

logger = logging.getLogger(__name__)

MAX_SENDS = 2
"""Times that a hand-off's bytes may be sent before the request has to be placed again."""


@dataclass(slots=True, kw_only=True)
class Incoming:
    """A hand-off from its negotiation on."""

    key: HandoffKey
    terms: HandoffTerms
    result: HandoffResult | None = None
    """Set once everything has arrived whole."""
    num_mismatches: int = 0
    check: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One digest at a time: a repeated Complete must not count as a second mismatch."""


class Intake:
    """All hand-offs into one worker.

    `on_ready` and `on_failed` are told at most once per reservation; whoever ends a reservation calls `forget`.
    """

    def __init__(
        self,
        *,
        reservations: Reservations,
        memory: PoolMemory,
        contract: CacheContract,
        engines: Sequence[TransferEngine],
        on_ready: Callable[[Reservation], None],
        on_failed: Callable[[Reservation, ServingError], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._reservations = reservations
        self._memory = memory
        self._contract = contract
        self._engines = {engine.name: engine for engine in engines}
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._incoming: dict[str, Incoming] = {}

    def negotiate(self, key: HandoffKey, capability: bytes, offer: HandoffOffer) -> HandoffTerms:
        """Agree on a hand-off and say where its bytes go; a repeated question gets the same answer.

        Raises ContractMismatch that names the field and both values; the reservation is untouched then.
        """
        reservation = self._authorize(key, capability)
        known = self._incoming.get(key.reservation_id)
        if known is not None:
            self._require_same(known, key)
            return known.terms
        self._contract.require_equal(offer.contract, ours="decode", theirs="prefill")
        if offer.num_tokens != reservation.num_tokens:
            raise ContractMismatch(
                f"num_tokens is {reservation.num_tokens} in the reservation but {offer.num_tokens} at prefill",
                metadata={"field": "num_tokens"},
            )
        engine = self._choose_engine(offer.transfer_engines)
        reservation.move(ReservationState.RECEIVING)
        self._reservations.touch(reservation)
        # Pages beyond the prompt belong to the request too, but nobody else writes them.
        pages = reservation.memory.take_all()[: num_pages_for(offer.num_tokens)]
        terms = HandoffTerms(
            transfer_engine=engine.name,
            destination=self._memory.placement(page_ids=tuple(pages), slot=reservation.memory.slot),
            engine_descriptor=engine.describe(),
        )
        self._incoming[key.reservation_id] = Incoming(key=key, terms=terms)
        return terms

    def writer(self, key: HandoffKey, capability: bytes) -> Write:
        """What puts bytes of a hand-off into memory, range by range, as long as it is being received.

        The writer raises InvalidRequest for a range that was not granted and TransferFailed once nothing may come.
        """
        reservation = self._authorize(key, capability)
        incoming = self._find(key)
        grant = WriteGrant(self._memory.layout, incoming.terms.destination)

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

    async def complete(self, key: HandoffKey, capability: bytes, result: HandoffResult) -> bool:
        """Check that everything came and hold the request ready; False asks for all bytes once more.

        Raises TransferFailed, the reservation being given up, when rows are missing or the second try differs too.
        """
        reservation = self._authorize(key, capability)
        incoming = self._find(key)
        _require_well_formed(result)
        async with incoming.check:
            if incoming.result is not None:
                return True
            is_whole = await self._check(reservation, incoming, result)
            if reservation.has_ended:
                raise RequestNotFound(f"request {key.request_id!r} was ended during its hand-off")
            if is_whole:
                incoming.result = result
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
        self._on_failed(reservation, TransferFailed(f"the prefill worker gave up: {reason}"))
        return reservation

    def result_of(self, reservation: Reservation) -> HandoffResult:
        """What arrived for a reservation that is READY."""
        result = self._incoming[reservation.reservation_id].result
        assert result is not None, f"{reservation.reservation_id} is {reservation.state}"
        return result

    def forget(self, reservation: Reservation) -> None:
        """The reservation has ended; its writers refuse from its change of state on."""
        self._incoming.pop(reservation.reservation_id, None)

    async def _check(
        self, reservation: Reservation, incoming: Incoming, result: HandoffResult
    ) -> bool:
        rows = live_rows(
            self._memory.layout,
            reservation.num_tokens,
            has_drafter_state=result.has_drafter_state,
        )
        try:
            require_complete(result.manifest, self._memory.layout, self._memory.regions, rows)
        except TransferFailed as error:
            self._on_failed(reservation, error)
            raise
        digest = await asyncio.to_thread(
            digest_rows, self._memory, incoming.terms.destination, rows
        )
        if digest == result.digest or reservation.has_ended:
            return True
        self.counts["digest_mismatches"] += 1
        incoming.num_mismatches += 1
        logger.warning(
            "hand-off of request %s: digest differs, try %d of %d",
            reservation.request_id,
            incoming.num_mismatches,
            MAX_SENDS,
        )
        if incoming.num_mismatches >= MAX_SENDS:
            failed = TransferFailed(
                f"the state of request {reservation.request_id!r} arrived altered {MAX_SENDS} times"
            )
            self._on_failed(reservation, failed)
            raise failed
        return False

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

    def _choose_engine(self, offered: tuple[str, ...]) -> TransferEngine:
        for name in offered:
            if name in self._engines:
                return self._engines[name]
        raise ContractMismatch(
            f"transfer_engines are {sorted(self._engines)} at decode but {sorted(offered)} at prefill",
            metadata={"field": "transfer_engines"},
        )


def _require_well_formed(result: HandoffResult) -> None:
    num_tokens, num_confidences = len(result.proposal.token_ids), len(result.proposal.confidences)
    if num_tokens != num_confidences:
        raise InvalidRequest(
            f"the proposal has {num_tokens} tokens and {num_confidences} confidences"
        )
