"""Families that a run's load does not move, and why. Knows names; every other family is expected to move."""

from __future__ import annotations

AT_START = {
    "dspark_build_info": "what runs does not change",
    "dspark_config_info": "what is configured does not change",
    "dspark_startup_duration_seconds": "the start is over when requests come",
    "dspark_weight_load_bytes_total": "weights are loaded before requests come",
    "dspark_weight_load_progress_ratio": "weights are loaded before requests come",
    "dspark_device_memory_bytes": "the engine takes its memory at its start",
    "dspark_kv_cache_capacity_tokens": "the cache has its size from the start",
    "dspark_role_capacity_pages": "workers do not come or go",
    "dspark_workers": "workers do not come or go",
    "dspark_kv_transport_info": "pairs keep their engine",
    "dspark_kv_pair_meetings_total": "workers meet before requests come",
}
"""Above zero from the first scrape on."""

BEYOND_LOAD = {
    "dspark_engine_failed": "no engine fails",
    "dspark_router_ejections_total": "no worker is lost",
    "dspark_reservations_expired_total": "no router is lost",
    "dspark_kv_lease_handoffs_total": "no decode worker is lost",
    "dspark_kv_transport_fallbacks_total": "every pair has the engine that it wants",
    "dspark_kv_refusals_total": "nothing malformed is sent; what a client's leaving leaves behind may be refused, or not",
    "dspark_kv_quarantined_pages": "a write of these few bytes has ended before it is given up",
    "dspark_kv_link_bytes_per_second": "no write of the small model is large enough to judge a link by",
    "dspark_spec_drafter_fallbacks_total": "prefill sends the drafter's state",
}
"""At zero as long as all goes well, or everything is small."""
