"""How full workers are, what an autoscaler sees, and what processes cost."""

from __future__ import annotations

from tools.dashboards.panels import Dashboard, Panel, Query, Row
from tools.dashboards.processes import PROCESSES, REQUESTS
from tools.dashboards.promql import rate

_ROOM = Row(
    title="How full are workers?",
    panels=(
        Panel(
            title="Cache in use",
            question="Which share of a worker's cache pages is held or promised? On prefill leases are part of it and give way.",
            queries=(
                Query(
                    expr="max by (role, pod) (dspark_kv_cache_usage_ratio)",
                    legend="{{role}} {{pod}}",
                ),
                Query(expr="max(dspark:threshold:kv_usage_ratio)", legend="alert", is_limit=True),
            ),
            unit="percentunit",
            maximum=1,
            runbook="DSparkCacheFull",
        ),
        Panel(
            title="Positions held and there",
            question="How many tokens of context are held, of how many?",
            queries=(
                Query(expr="sum by (role) (dspark_kv_cache_used_tokens)", legend="{{role}} held"),
                Query(
                    expr="sum by (role) (dspark_kv_cache_capacity_tokens)",
                    legend="{{role}} there",
                ),
            ),
            unit="short",
        ),
        Panel(
            title="Request slots in use",
            question="Which share of the slots is taken? One request needs one, however short it is.",
            queries=(
                Query(
                    expr='sum by (role, pod) (dspark_request_slots{state="used"}) '
                    "/ sum by (role, pod) (dspark_request_slots)",
                    legend="{{role}} {{pod}}",
                ),
            ),
            unit="percentunit",
            maximum=1,
            warn=0.8,
            bad=1,
        ),
        Panel(
            title="Reservations on decode",
            question="What do reservations wait for? `aborting` should be rare and short.",
            queries=(
                Query(
                    expr='sum by (state) (dspark_reservations{role="decode"})', legend="{{state}}"
                ),
                Query(
                    expr="sum(increase(dspark_reservations_expired_total[$__rate_interval]))",
                    legend="expired",
                ),
            ),
            unit="short",
            width=6,
            is_stacked=True,
        ),
        Panel(
            title="Current step",
            question="Does an engine hang? How long its current step has taken so far.",
            queries=(
                Query(
                    expr="max by (role, pod) (dspark_engine_busy_seconds)",
                    legend="{{role}} {{pod}}",
                ),
                Query(expr="max(dspark:threshold:stall_seconds)", legend="alert", is_limit=True),
            ),
            unit="s",
            width=6,
            runbook="DSparkEngineStalled",
        ),
        Panel(
            title="Since the last step",
            question="When did an engine last do something? Large without requests, small with them.",
            queries=(
                Query(
                    expr="time() - max by (role, pod) (dspark_last_step_timestamp_seconds > 0)",
                    legend="{{role}} {{pod}}",
                ),
            ),
            unit="s",
            width=6,
            runbook="DSparkEngineStalled",
        ),
        Panel(
            title="Failed engines",
            question="Is there a worker whose engine has failed while its process is still there?",
            queries=(Query(expr="sum by (role) (dspark_engine_failed)", legend="{{role}}"),),
            unit="short",
            kind="stat",
            width=6,
            bad=1,
            runbook="DSparkEngineStalled",
        ),
    ),
)

_SCALING = Row(
    title="What does an autoscaler see?",
    panels=(
        Panel(
            title="Oldest wait by role",
            question="How long has the oldest request waited for a role, and how long will a new one?",
            queries=(
                Query(expr="max by (role) (dspark_role_waiting_seconds)", legend="{{role}} oldest"),
                Query(
                    expr="max(dspark_router_expected_wait_seconds)", legend="expected of a new one"
                ),
                Query(
                    expr="max(dspark:threshold:queue_wait_seconds)", legend="alert", is_limit=True
                ),
            ),
            unit="s",
            runbook="DSparkQueueGrowing",
        ),
        Panel(
            title="Requests by role",
            question="How many requests wait for each role, and how many does it have?",
            queries=(
                Query(
                    expr="sum by (role) (dspark_role_queued_requests)", legend="{{role}} waiting"
                ),
                Query(
                    expr="sum by (role) (dspark_role_running_requests)", legend="{{role}} running"
                ),
            ),
            unit="short",
            runbook="DSparkQueueGrowing",
        ),
        Panel(
            title="Tokens of work by role",
            question="How much work is that, in tokens? Prompt tokens for prefill, tokens that may be generated for decode.",
            queries=(
                Query(expr="sum by (role) (dspark_role_queued_tokens)", legend="{{role}} waiting"),
                Query(expr="sum by (role) (dspark_role_running_tokens)", legend="{{role}} running"),
            ),
            unit="short",
        ),
        Panel(
            title="Pages by role",
            question="How many cache pages do requests hold, of how many on usable workers?",
            queries=(
                Query(expr="sum by (role) (dspark_role_reserved_pages)", legend="{{role}} held"),
                Query(expr="max by (role) (dspark_role_capacity_pages)", legend="{{role}} there"),
            ),
            unit="short",
        ),
        Panel(
            title="Placements by worker",
            question="Is work spread evenly over workers?",
            queries=(
                Query(
                    expr=rate("dspark_router_worker_selections_total", by="role, worker"),
                    legend="{{role}} {{worker}}",
                ),
            ),
            unit="ops",
        ),
        Panel(
            title="Where state came from",
            question="Was a placement's state computed by prefill, kept under a lease, or computed by decode itself?",
            queries=(
                Query(
                    expr=rate("dspark_router_placements_total", by="source"), legend="{{source}}"
                ),
            ),
            unit="ops",
            is_stacked=True,
        ),
    ),
)

CAPACITY = Dashboard(
    name="capacity",
    title="Capacity",
    about="How full are workers, what would an autoscaler do, and what do processes cost?",
    rows=(_ROOM, _SCALING, REQUESTS, PROCESSES),
)
