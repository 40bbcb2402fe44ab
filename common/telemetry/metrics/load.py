"""How much work a router has for each role: what an autoscaler scales workers by. Knows names; counts nothing itself.

Figures of several routers add up, but for waiting time and capacity, of which the largest counts.
"""

from __future__ import annotations

from common.telemetry.metrics.families import Families

ROLES = ("prefill", "decode")


class RoleMetrics:
    """Load per role of the workers behind one router."""

    def __init__(self, families: Families) -> None:
        self.queued_requests = families.gauges(
            "dspark_role_queued_requests",
            "This router's requests that wait for a place on workers of the role.",
            role=ROLES,
        )
        self.queued_tokens = families.gauges(
            "dspark_role_queued_tokens",
            "Tokens of work in the requests that wait: prompt tokens to compute for prefill, tokens that may be "
            "generated for decode.",
            role=ROLES,
        )
        self.running_requests = families.gauges(
            "dspark_role_running_requests",
            "This router's requests on workers of the role; on prefill until the state is handed over.",
            role=ROLES,
        )
        self.running_tokens = families.gauges(
            "dspark_role_running_tokens",
            "Tokens of work in the requests on workers, as they were placed: prompt tokens for prefill, tokens that "
            "may be generated for decode.",
            role=ROLES,
        )
        self.reserved_pages = families.gauges(
            "dspark_role_reserved_pages",
            "Cache pages of 128 tokens that this router's requests hold on workers of the role.",
            role=ROLES,
        )
        self.capacity_pages = families.gauges(
            "dspark_role_capacity_pages",
            "Cache pages of all usable workers of the role, as they say.",
            role=ROLES,
        )
        self.waiting = families.gauges(
            "dspark_role_waiting_seconds",
            "How long the oldest request has waited for the role: for decode without a place, for prefill without "
            "a first token.",
            role=ROLES,
        )
