"""What is counted about hand-offs, on either side of them. Knows names and label values; moves no byte."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from common.errors import (
    CapabilityRefused,
    ContractMismatch,
    DuplicateRequest,
    InvalidRequest,
    PairUnknown,
    RequestNotFound,
    ServingError,
)
from common.telemetry.metrics.families import SECONDS, Families

TRANSFER_ENGINES = ("nixl", "mooncake", "grpc")
FAILURE_REASONS = ("write_failed", "timeout", "digest", "refused", "peer_lost")
MEETING_KINDS = ("warm", "cold", "again")
LEASE_ENDINGS = ("released", "expired", "evicted")
_REFUSALS = {
    InvalidRequest.reason: "malformed",
    ContractMismatch.reason: "contract_mismatch",
    CapabilityRefused.reason: "capability_refused",
    PairUnknown.reason: "pair_unknown",
    RequestNotFound.reason: "request_not_found",
    DuplicateRequest.reason: "duplicate_request",
}
"""By the reason of the error that says so."""
_MALFORMED = ("manifest", "write")
"""Fields of a malformed message that are counted by their name."""
REFUSALS = (*_REFUSALS.values(), *_MALFORMED)

_BYTES_PER_SECOND = tuple(1e6 * 4**exponent for exponent in range(10))
"""From 1 MB/s to 262 GB/s."""
_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class TransferMetrics:
    """Writes, hand-offs, leases and quarantine of one worker. What only one side does stays 0 on the other."""

    def __init__(self, families: Families) -> None:
        self.duration = families.histograms(
            "dspark_kv_transfer_duration_seconds",
            "From posting a write to its last byte's arrival, by transfer engine. On prefill.",
            SECONDS,
            engine=TRANSFER_ENGINES,
        )
        self.bytes = families.counters(
            "dspark_kv_transfer_bytes_total",
            "Bytes of cache rows that were written to peers, by transfer engine. On prefill.",
            engine=TRANSFER_ENGINES,
        )
        self.rate = families.histograms(
            "dspark_kv_transfer_bytes_per_second",
            "Speed of each write, by transfer engine. On prefill.",
            _BYTES_PER_SECOND,
            engine=TRANSFER_ENGINES,
        )
        self.link_busy = families.counter(
            "dspark_kv_link_busy_seconds_total",
            "Seconds in which at least one write was under way: its rate is the hand-offs' share of the link. On prefill.",
        )
        self.link_rate = families.gauges(
            "dspark_kv_link_bytes_per_second",
            "The fastest write so far: what the link can do. On prefill.",
            engine=TRANSFER_ENGINES,
        )
        self.handoff_duration = families.histograms(
            "dspark_kv_handoff_duration_seconds",
            "From a request's first proposal to the receiver's acknowledgement, by transfer engine. On prefill.",
            SECONDS,
            engine=TRANSFER_ENGINES,
        )
        self.handoff_overhead = families.histograms(
            "dspark_kv_handoff_overhead_seconds",
            "Of a hand-off's duration, what was not spent writing, by transfer engine. On prefill.",
            SECONDS,
            engine=TRANSFER_ENGINES,
        )
        self.handoff_tail = families.histogram(
            "dspark_kv_handoff_tail_ratio",
            "Share of a hand-off's bytes that had not arrived when its first proposal was drafted. On prefill.",
            _RATIOS,
        )
        self.handoffs_in_progress = families.gauge(
            "dspark_kv_handoffs_in_progress",
            "Hand-offs between their negotiation and their end: sent on prefill, received on decode.",
        )
        self.lease_handoffs = families.counter(
            "dspark_kv_lease_handoffs_total",
            "Hand-offs of state that was computed before and kept under a lease. On prefill.",
        )
        self.received_bytes = families.counters(
            "dspark_kv_received_bytes_total",
            "Bytes of cache rows that arrived whole, by transfer engine. On decode.",
            engine=TRANSFER_ENGINES,
        )
        self.receive_duration = families.histograms(
            "dspark_kv_receive_duration_seconds",
            "From a hand-off's negotiation to the state's acceptance, the computation of the prompt included, by "
            "transfer engine. On decode.",
            SECONDS,
            engine=TRANSFER_ENGINES,
        )
        self.failures = families.counters(
            "dspark_kv_transfer_failures_total",
            "Hand-offs that failed in this process, by reason. On prefill.",
            reason=FAILURE_REASONS,
        )
        self.refusals = families.counters(
            "dspark_kv_refusals_total",
            "Messages and writes about hand-offs that were refused, by reason. What decode refuses of a meeting, prefill "
            "counts too.",
            reason=REFUSALS,
        )
        self.digest_mismatches = families.counters(
            "dspark_kv_digest_mismatches_total",
            "Regions whose rows arrived altered, by the peer that sent them. On decode.",
            peer=None,
            region=None,
        )
        self.transport = families.gauges(
            "dspark_kv_transport_info",
            "1 for the transfer engine that is used with a peer, with the reason.",
            peer=None,
            engine=None,
            reason=None,
        )
        self.fallbacks = families.counters(
            "dspark_kv_transport_fallbacks_total",
            "Times that a peer was met with a slower transfer engine than this worker wanted, by the engine that was "
            "wanted.",
            wanted=TRANSFER_ENGINES,
        )
        self.meetings = families.counters(
            "dspark_kv_pair_meetings_total",
            "Introductions to peers; cold ones held up a request. On prefill.",
            kind=MEETING_KINDS,
        )
        self.leases = families.gauge(
            "dspark_kv_leases", "Finished prefills whose state is kept under a lease. On prefill."
        )
        self.leases_ended = families.counters(
            "dspark_kv_leases_ended_total",
            "Leases that ended: released by a router, expired, or evicted because their room was needed. On prefill.",
            reason=LEASE_ENDINGS,
        )
        self.quarantined_pages = families.gauge(
            "dspark_kv_quarantined_pages",
            "Pages of ended hand-offs that a peer may still read or write.",
        )

    def chose_engine(self, *, peer: str, engine: str, reason: str) -> None:
        """The engine that is used with a peer from now on."""
        self.forget_peer(peer)
        self.transport.labels(peer=peer, engine=engine, reason=reason).set(1)

    def forget_peer(self, peer: str) -> None:
        """The peer is not met any more."""
        self.transport.remove(peer=peer)

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count what the block refuses; other errors are none of it."""
        try:
            yield
        except ServingError as error:
            self.count_refusal(error)
            raise

    def count_refusal(self, error: ServingError) -> None:
        """Count an error that refuses something; any other is not counted."""
        reason = _REFUSALS.get(error.reason)
        if reason is not None:
            field = error.metadata.get("field", "")
            is_named = isinstance(error, InvalidRequest) and field in _MALFORMED
            self.refusals.labels(reason=field if is_named else reason).inc()

    def know_regions(self, *, peer: str, regions: Iterable[str]) -> None:
        """Begin to count a peer's digests at zero."""
        for region in regions:
            self.digest_mismatches.labels(peer=peer, region=region)
