"""The line of figures that one looks at first. Knows which; not how they are drawn."""

from __future__ import annotations

from tools.dashboards.panels import Panel, Query, Row
from tools.dashboards.promql import mean, per, quantile, rate

FIRST_TOKEN = "dspark_time_to_first_token_seconds"
BETWEEN_TOKENS = "dspark_inter_token_latency_seconds"
FAILED = 'dspark_requests_total{code=~"resource_exhausted|unavailable|aborted|internal|deadline_exceeded"}'
# Routers do not add up here: each sees the same workers.
READY = 'max by (role) (sum by (role, instance) (dspark_workers{state="ready"}))'
ALERTS = (
    'ALERTS{alertname=~"DSpark.+", alertstate="firing", namespace=~"$namespace", model=~"$model"}'
)

HEADLINES = Row(
    title="Does it serve now?",
    panels=(
        Panel(
            title="Ready workers",
            question="Is there a worker of each role that takes requests? The router's view; both roles are needed.",
            queries=(Query(expr=READY, legend="{{role}}"),),
            unit="short",
            kind="stat",
            width=3,
            height=4,
            bad_below=1,
            runbook="DSparkNoReadyDecode",
        ),
        Panel(
            title="Failing requests",
            question="Which share of requests fails by the service's fault? Clients' own mistakes and cancellations do not count.",
            queries=(Query(expr=per(FAILED, "dspark_requests_total")),),
            unit="percentunit",
            kind="stat",
            width=3,
            height=4,
            warn=0.005,
            bad=0.05,
            runbook="DSparkErrorBudgetBurnFast",
        ),
        Panel(
            title="First token, p95",
            question="How long do nineteen of twenty users wait at most until an answer begins?",
            queries=(Query(expr=quantile(FIRST_TOKEN, q=0.95)),),
            unit="s",
            kind="stat",
            width=3,
            height=4,
            warn=2,
            bad=5,
            runbook="DSparkSlowFirstToken",
        ),
        Panel(
            title="Between tokens, p95",
            question="How steadily does text appear?",
            queries=(Query(expr=quantile(BETWEEN_TOKENS, q=0.95)),),
            unit="s",
            kind="stat",
            width=3,
            height=4,
            warn=0.1,
            bad=0.2,
            runbook="DSparkSlowTokens",
        ),
        Panel(
            title="Requests in flight",
            question="How many requests are between their validation and their end?",
            queries=(Query(expr="sum(dspark_requests_in_flight)"),),
            unit="short",
            kind="stat",
            width=3,
            height=4,
        ),
        Panel(
            title="Tokens a second",
            question="How many tokens reach clients each second, over all requests?",
            queries=(Query(expr=rate("dspark_generation_tokens_total")),),
            unit="short",
            kind="stat",
            decimals=0,
            width=3,
            height=4,
        ),
        Panel(
            title="Tokens a round",
            question="Does speculation pay? Tokens that one forward of the target brings; without drafts it is 1.",
            queries=(Query(expr=mean("dspark_spec_accepted_length", '{role="decode"}')),),
            unit="short",
            kind="stat",
            decimals=2,
            width=3,
            height=4,
            runbook="DSparkAcceptanceCollapse",
        ),
        Panel(
            title="Alerts firing",
            question="How many alerts of the chart's rules fire now?",
            queries=(Query(expr=f"count({ALERTS}) or vector(0)"),),
            unit="short",
            kind="stat",
            width=3,
            height=4,
            bad=1,
        ),
    ),
)
