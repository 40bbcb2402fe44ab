"""The check that a hand-off came whole and as it was sent. Knows manifests and digests; answers no messages."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from common.errors import InvalidRequest, ServingError, TransferFailed
from common.telemetry.metrics import TransferMetrics
from common.transfer.handoff import HandoffResult
from common.transfer.manifest import require_complete
from common.transfer.memory import PoolMemory
from common.transfer.plan import live_rows
from services.decode.incoming import Incoming
from services.decode.meetings import Meetings
from services.decode.reservations import Reservation

logger = logging.getLogger(__name__)

MAX_SENDS = 2
"""Times that a hand-off's bytes may be sent before the request has to be placed again."""


class WholenessCheck:
    """Compares what arrived with what the sender says that it sent, and counts what differs."""

    def __init__(
        self,
        *,
        memory: PoolMemory,
        meetings: Meetings,
        metrics: TransferMetrics,
        counts: Counter[str],
        on_failed: Callable[[Reservation, ServingError], None],
    ) -> None:
        self._memory = memory
        self._meetings = meetings
        self._metrics = metrics
        self._counts = counts
        self._on_failed = on_failed

    async def is_whole(
        self, reservation: Reservation, incoming: Incoming, result: HandoffResult
    ) -> bool:
        """Whether everything came, unaltered; False asks for all bytes once more. One at a time for each hand-off.

        Raises TransferFailed when rows are missing or the second try differs too, and InvalidRequest when the manifest is
        malformed. `on_failed` is told that the transfer failed: what a sender says wrongly is not its client's fault.
        """
        rows = live_rows(
            self._memory.layout,
            incoming.num_tokens,
            has_drafter_state=result.has_drafter_state,
        )
        try:
            require_complete(result.manifest, self._memory.layout, self._memory.regions, rows)
        except (InvalidRequest, TransferFailed) as error:
            self._on_failed(reservation, TransferFailed(error.message, metadata=error.metadata))
            raise
        began = time.monotonic()
        digests, announced = await incoming.arrivals.finish(rows), result.digests
        incoming.digest_s = time.monotonic() - began
        if not result.has_drafter_state:
            # One of the two may not even have the drafter's region, which is the last.
            num_regions = len(self._memory.layout.target.regions)
            digests, announced = digests[:num_regions], announced[:num_regions]
        if digests == announced or reservation.has_ended:
            return True
        incoming.arrivals.begin_anew()
        self._counts["digest_mismatches"] += 1
        incoming.num_mismatches += 1
        logger.warning(
            "hand-off of request %s: digest of %s differs, try %d of %d",
            reservation.request_id,
            ", ".join(self._count_altered(incoming, digests, announced)),
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

    def _count_altered(
        self, incoming: Incoming, found: Sequence[bytes], announced: Sequence[bytes]
    ) -> list[str]:
        """Names of the regions whose rows arrived altered."""
        pairs = itertools.zip_longest(self._memory.layout.regions, found, announced)
        altered = [region.name for region, ours, theirs in pairs if region and ours != theirs]
        peer = self._meetings.address_of(incoming.key)
        for name in altered:
            self._metrics.digest_mismatches.labels(peer=peer, region=name).inc()
        return altered


def require_well_formed(result: HandoffResult) -> None:
    """Raises InvalidRequest when a result contradicts itself."""
    num_tokens, num_confidences = len(result.proposal.token_ids), len(result.proposal.confidences)
    if num_tokens != num_confidences:
        raise InvalidRequest(
            f"the proposal has {num_tokens} tokens and {num_confidences} confidences"
        )
