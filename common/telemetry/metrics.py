"""The names of all metrics, and the figures of one process. Knows names and labels; not where the numbers come from.

Label values that are known beforehand are there from the start, at zero: a rate over a counter that appears with its
first event misses that event.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

TRANSFER_ENGINES = ("nixl", "mooncake", "grpc")
FAILURE_REASONS = ("write_failed", "timeout", "digest", "refused", "peer_lost")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def process_registry() -> CollectorRegistry:
    """A registry with what the operating system knows of this process: CPU seconds, memory, open files."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


class TransferMetrics:
    """What is counted about hand-offs, on either side of them. One object a process, with a registry of its own."""

    def __init__(self) -> None:
        self.registry = process_registry()
        self.duration = Histogram(
            "dspark_kv_transfer_duration_seconds",
            "From posting a write to its last byte's arrival, by transfer engine.",
            ["engine"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.handoff_duration = Histogram(
            "dspark_kv_handoff_duration_seconds",
            "From a request's first token to the receiver's acknowledgement, by transfer engine.",
            ["engine"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.bytes = Counter(
            "dspark_kv_transfer_bytes_total",
            "Bytes of cache rows that were written to peers, by transfer engine.",
            ["engine"],
            registry=self.registry,
        )
        self.failures = Counter(
            "dspark_kv_transfer_failures_total",
            "Hand-offs that failed in this process, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.transport = Gauge(
            "dspark_kv_transport_info",
            "1 for the transfer engine that is used with a peer, with the reason.",
            ["peer", "engine", "reason"],
            registry=self.registry,
        )
        self.fallbacks = Counter(
            "dspark_kv_transport_fallbacks_total",
            "Times that a peer was met with a slower transfer engine than was wanted, by the engine that was wanted.",
            ["wanted"],
            registry=self.registry,
        )
        self.meetings = Counter(
            "dspark_kv_pair_meetings_total",
            "Introductions to peers; cold ones held up a request.",
            ["kind"],
            registry=self.registry,
        )
        self.leases = Gauge(
            "dspark_kv_leases",
            "Finished prefills whose state is kept under a lease.",
            registry=self.registry,
        )
        self.quarantined_pages = Gauge(
            "dspark_kv_quarantined_pages",
            "Pages of ended hand-offs that a peer may still read or write.",
            registry=self.registry,
        )
        self.digest_mismatches = Counter(
            "dspark_kv_digest_mismatches_total",
            "Regions whose rows arrived altered, by the peer that sent them.",
            ["peer", "region"],
            registry=self.registry,
        )
        self._begin_at_zero()

    def chose_engine(self, *, peer: str, engine: str, reason: str) -> None:
        """The engine that is used with a peer from now on."""
        self.forget_peer(peer)
        self.transport.labels(peer=peer, engine=engine, reason=reason).set(1)

    def forget_peer(self, peer: str) -> None:
        """The peer is not met any more."""
        self.transport.remove_by_labels({"peer": peer})

    def know_regions(self, *, peer: str, regions: Iterable[str]) -> None:
        """Begin to count a peer's digests at zero."""
        for region in regions:
            self.digest_mismatches.labels(peer=peer, region=region)

    def _begin_at_zero(self) -> None:
        for engine in TRANSFER_ENGINES:
            self.duration.labels(engine=engine)
            self.handoff_duration.labels(engine=engine)
            self.bytes.labels(engine=engine)
            self.fallbacks.labels(wanted=engine)
        for reason in FAILURE_REASONS:
            self.failures.labels(reason=reason)
        for kind in ("warm", "cold", "again"):
            self.meetings.labels(kind=kind)
