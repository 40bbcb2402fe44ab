"""What leaves prefill workers: hand-offs, bytes, leases. Rows of the prefill page."""

from __future__ import annotations

from tools.dashboards.panels import Panel, Query, Row
from tools.dashboards.promql import heat, mean, quantile, quantiles, rate

ON_PREFILL = '{role="prefill"}'
ON_DECODE = '{role="decode"}'
HANDOFF = "dspark_kv_handoff_duration_seconds"

HANDOFFS = Row(
    title="How long does the hand-off take?",
    panels=(
        Panel(
            title="Hand-off time against its baseline",
            question="Is decode held up longer than usual? From a request's first token to the receiver's acknowledgement.",
            queries=(
                *quantiles(HANDOFF, ON_PREFILL),
                Query(
                    expr="max(dspark:kv_handoff_duration_seconds:p95_median1d)",
                    legend="usual p95",
                    is_limit=True,
                ),
            ),
            unit="s",
            runbook="DSparkHandoffSlow",
        ),
        Panel(
            title="Hand-offs by time",
            question="Is a slow hand-off rare, or is there a slow pair?",
            queries=heat(HANDOFF, ON_PREFILL),
            unit="s",
            kind="heatmap",
        ),
        Panel(
            title="Left to send after the prompt",
            question="How much of the state is still to be sent when its prompt is computed? The rest travelled meanwhile.",
            queries=(Query(expr=mean("dspark_kv_handoff_tail_ratio"), legend="mean"),),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            title="Writes by engine",
            question="How long does one write take with each transfer engine?",
            queries=(
                Query(
                    expr=f"{quantile('dspark_kv_transfer_duration_seconds', ON_PREFILL, q=0.95, by='engine')} >= 0",
                    legend="{{engine}} p95",
                ),
            ),
            unit="s",
        ),
        Panel(
            title="Receiving",
            question="How long does decode hold room for a request before it runs? The prompt's computation is part of it.",
            queries=quantiles("dspark_kv_receive_duration_seconds", ON_DECODE),
            unit="s",
        ),
        Panel(
            title="Hand-offs in progress",
            question="How many hand-offs are open on each side? Both sides should agree.",
            queries=(
                Query(expr="sum by (role) (dspark_kv_handoffs_in_progress)", legend="{{role}}"),
            ),
            unit="short",
        ),
    ),
)

NETWORK = Row(
    title="What does the network carry?",
    panels=(
        Panel(
            title="Bytes sent and received",
            question="How many bytes of cache rows travel each second, and does as much arrive as was sent?",
            queries=(
                Query(
                    expr=rate(f"dspark_kv_transfer_bytes_total{ON_PREFILL}", by="engine"),
                    legend="{{engine}} sent",
                ),
                Query(
                    expr=rate(f"dspark_kv_received_bytes_total{ON_DECODE}", by="engine"),
                    legend="{{engine}} received",
                ),
            ),
            unit="Bps",
        ),
        Panel(
            title="Share of the link",
            question="In which share of the time is a hand-off on a worker's link? Near 1 the network is the limit.",
            queries=(
                Query(
                    expr=rate(f"dspark_kv_link_busy_seconds_total{ON_PREFILL}", by="pod"),
                    legend="{{pod}}",
                ),
            ),
            unit="percentunit",
            maximum=1,
            warn=0.6,
            bad=0.9,
            runbook="DSparkHandoffSlow",
        ),
        Panel(
            title="Speed of a write against the link's",
            question="Do writes use what the link can do? The dashed line is the fastest large write so far.",
            queries=(
                Query(
                    expr=quantile("dspark_kv_transfer_bytes_per_second", ON_PREFILL, q=0.5),
                    legend="p50",
                ),
                Query(
                    expr=f"max(dspark_kv_link_bytes_per_second{ON_PREFILL})",
                    legend="link",
                    is_limit=True,
                ),
            ),
            unit="Bps",
        ),
        Panel(
            title="Pairs",
            question="Which workers are acquainted, by which engine, and why by that one?",
            queries=(
                Query(expr="max by (role, pod, peer, engine, reason) (dspark_kv_transport_info)"),
            ),
            unit="short",
            kind="table",
            width=12,
            runbook="DSparkTransferFellBack",
        ),
        Panel(
            title="Pairs that fell back",
            question="Does a pair move bytes with a slower engine than it could?",
            queries=(
                Query(
                    expr="sum by (role, pod) (dspark:kv_transport_fallen_back:pairs)",
                    legend="{{role}} {{pod}}",
                ),
            ),
            unit="short",
            width=6,
            bad=1,
            runbook="DSparkTransferFellBack",
        ),
        Panel(
            title="Introductions",
            question="Do workers meet before requests do? A cold meeting held one up.",
            queries=(
                Query(
                    expr="sum by (kind) (increase(dspark_kv_pair_meetings_total[$__rate_interval]))",
                    legend="{{kind}}",
                ),
            ),
            unit="short",
            width=6,
        ),
    ),
)

FAULTS = Row(
    title="What goes wrong on the way, and is memory given back?",
    panels=(
        Panel(
            title="Failed hand-offs",
            question="Why do hand-offs fail? The request is placed again.",
            queries=(
                Query(
                    expr=rate("dspark_kv_transfer_failures_total", by="reason"),
                    legend="{{reason}}",
                ),
            ),
            unit="ops",
            runbook="DSparkHandoffFailing",
        ),
        Panel(
            title="Altered rows",
            question="Did bytes arrive altered, from whom and in which region? They were sent once more.",
            queries=(
                Query(
                    expr="sum by (peer, region) (increase(dspark_kv_digest_mismatches_total[$__rate_interval]))",
                    legend="{{peer}} {{region}}",
                ),
            ),
            unit="short",
            bad=1,
            runbook="DSparkHandoffCorrupted",
        ),
        Panel(
            title="Refusals",
            question="Does decode refuse messages or writes, as it must when they are late or foreign?",
            queries=(
                Query(expr=rate("dspark_kv_refusals_total", by="reason"), legend="{{reason}}"),
            ),
            unit="ops",
        ),
        Panel(
            title="Leases",
            question="How much finished state is kept for another decode worker? It returns to zero with the load.",
            queries=(Query(expr=f"sum by (pod) (dspark_kv_leases{ON_PREFILL})", legend="{{pod}}"),),
            unit="short",
            runbook="DSparkLeasesNotDraining",
        ),
        Panel(
            title="How leases end",
            question="Are leases released by routers? Expiry tells of a router that is gone, eviction of missing room, "
            "hand-offs of decode workers that were lost.",
            queries=(
                Query(expr=rate("dspark_kv_leases_ended_total", by="reason"), legend="{{reason}}"),
                Query(expr=rate("dspark_kv_lease_handoffs_total"), legend="handed off again"),
            ),
            unit="ops",
        ),
        Panel(
            title="Pages in quarantine",
            question="How many pages may a peer still touch after their hand-off ended?",
            queries=(
                Query(
                    expr="sum by (role, pod) (dspark_kv_quarantined_pages)",
                    legend="{{role}} {{pod}}",
                ),
            ),
            unit="short",
            bad=1,
            runbook="DSparkQuarantineNotDraining",
        ),
    ),
)
