"""What both kinds of worker count about their engine: queue, cache, steps. Knows names; never sees a request."""

from __future__ import annotations

from collections.abc import Sequence

from common.claims import MemoryKind, RankMemory
from common.telemetry.metrics.families import SECONDS, Families

STEP_PHASES = ("schedule", "verify", "sample", "draft", "copy", "commit")
"""Parts of a step in their order. verify is the target's forward over all rows, prompt chunks included; sample decides
what is accepted and draws; copy waits for the device."""

RESERVATION_STATES = ("reserved", "receiving", "ready", "running", "aborting")

_STEP_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0),
)
_ROWS = tuple(2**exponent for exponent in range(14))
_REQUESTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)


class EngineMetrics:
    """Requests, memory and steps of one worker; the same families on prefill and decode."""

    def __init__(self, families: Families) -> None:
        self.queue_requests = families.gauge(
            "dspark_queue_requests",
            "Requests that wait: for room on prefill, for their state on decode.",
        )
        self.running_requests = families.gauge(
            "dspark_running_requests",
            "Requests that hold room and are computed, handed over or generated.",
        )
        self.queue_uncached_tokens = families.gauge(
            "dspark_queue_uncached_tokens",
            "Prompt tokens of this worker's requests that are not computed yet.",
        )
        self.queue_duration = families.histogram(
            "dspark_queue_duration_seconds",
            "From a request's arrival here to its first step.",
            SECONDS,
        )
        self.kv_cache_capacity_tokens = families.gauge(
            "dspark_kv_cache_capacity_tokens", "Positions that all cache pages hold together."
        )
        self.kv_cache_used_tokens = families.gauge(
            "dspark_kv_cache_used_tokens",
            "Positions of the pages that are held by requests, leases or quarantine, or promised to a request.",
        )
        self.kv_cache_usage_ratio = families.gauge(
            "dspark_kv_cache_usage_ratio", "Used positions by capacity, 0 to 1."
        )
        self.request_slots = families.gauges(
            "dspark_request_slots",
            "Ring slots, one per request that holds state.",
            state=("used", "free"),
        )
        self.reservations = families.gauges(
            "dspark_reservations",
            "Reservations of room by state; always 0 on prefill.",
            state=RESERVATION_STATES,
        )
        self.reservations_expired = families.counter(
            "dspark_reservations_expired_total",
            "Reservations that ended because nothing was heard of them any more.",
        )
        self.step_duration = families.histogram(
            "dspark_step_duration_seconds", "Duration of an engine step.", _STEP_SECONDS
        )
        self.step_phase = families.counters(
            "dspark_step_phase_seconds_total",
            "Seconds of engine steps by phase. verify is the target's forward over all rows, prompt chunks included; "
            "sample decides what is accepted and draws; copy waits for the device.",
            phase=STEP_PHASES,
        )
        self.step_rows = families.histogram(
            "dspark_step_rows", "Rows of a step: prompt tokens, newest tokens and drafts.", _ROWS
        )
        self.step_batch_size = families.histogram(
            "dspark_step_batch_size", "Requests in a step.", _REQUESTS
        )
        self.last_step_timestamp = families.gauge(
            "dspark_last_step_timestamp_seconds",
            "Unix time of the end of the last step; 0 before the first.",
        )
        self.engine_busy = families.gauge(
            "dspark_engine_busy_seconds",
            "How long the current step has taken so far; 0 while the engine sleeps.",
        )
        self.engine_failed = families.gauge(
            "dspark_engine_failed", "1 once the engine has failed, after which nothing runs here."
        )
        self.prompt_tokens_computed = families.counter(
            "dspark_prompt_tokens_computed_total",
            "Prompt tokens whose state was computed here, those of repeated placements again.",
        )
        self.tokens_sampled = families.counter(
            "dspark_tokens_sampled_total",
            "Tokens that steps brought: accepted drafts and the target's own.",
        )
        self.tokens_discarded = families.counter(
            "dspark_tokens_discarded_total",
            "Sampled tokens that became part of no answer: their request had ended, or ended before them.",
        )
        self.device_memory = families.gauges(
            "dspark_device_memory_bytes",
            "Memory that each rank of this worker keeps on its device for as long as it lives, by what it is for; host is "
            "what the first rank of a mesh keeps in its node's memory for hand-offs.",
            rank=("0",),
            kind=tuple(kind.value for kind in MemoryKind),
        )

    def set_device_memory(self, memory: Sequence[RankMemory]) -> None:
        """Say what all ranks hold; those beyond the first appear now."""
        for each in memory:
            for kind, num_bytes in each.by_kind().items():
                self.device_memory.labels(rank=str(each.rank), kind=kind.value).set(num_bytes)
