"""The first page: whether the service serves, how it feels to users, and what fails."""

from __future__ import annotations

from tools.dashboards.headlines import HEADLINES
from tools.dashboards.panels import Dashboard, Panel, Query, Row
from tools.dashboards.promql import heat, occurring, per, quantiles, rate

FIRST_TOKEN = "dspark_time_to_first_token_seconds"
BETWEEN_TOKENS = "dspark_inter_token_latency_seconds"
STAGES = "dspark_request_stage_duration_seconds"
UNTIL_FIRST_TOKEN = f'{STAGES}_sum{{stage=~"tokenize|queue|prefill_queue|prefill|prefill_rpc"}}'

_USERS = Row(
    title="What do users feel?",
    panels=(
        Panel(
            title="Time to the first token",
            question="How long does an answer take to begin, and is the alert's limit near?",
            queries=(
                *quantiles(FIRST_TOKEN),
                Query(
                    expr="max(dspark:threshold:first_token_seconds)",
                    legend="alert",
                    is_limit=True,
                ),
            ),
            unit="s",
            runbook="DSparkSlowFirstToken",
        ),
        Panel(
            title="Where the first token's time goes",
            question="Which part of the wait is it? The stages are measured one after the other, so they add up to the mean "
            "time to the first token.",
            queries=(
                Query(
                    expr=per(UNTIL_FIRST_TOKEN, f"{FIRST_TOKEN}_count", by="stage"),
                    legend="{{stage}}",
                ),
            ),
            unit="s",
            is_stacked=True,
            runbook="DSparkSlowFirstToken",
        ),
        Panel(
            title="First tokens by time",
            question="Is a long wait rare, or is there a second group of slow requests?",
            queries=heat(FIRST_TOKEN),
            unit="s",
            kind="heatmap",
        ),
        Panel(
            title="Time between tokens",
            question="Does text flow? The tokens of one round share its time evenly.",
            queries=(
                *quantiles(BETWEEN_TOKENS),
                Query(
                    expr="max(dspark:threshold:inter_token_seconds)",
                    legend="alert",
                    is_limit=True,
                ),
            ),
            unit="s",
            runbook="DSparkSlowTokens",
        ),
        Panel(
            title="Where a request's time goes",
            question="Which stage makes requests long, from arrival to end? The mean of each, one upon the other.",
            queries=(
                Query(
                    expr=per(f"{STAGES}_sum", "dspark_request_duration_seconds_count", by="stage"),
                    legend="{{stage}}",
                ),
            ),
            unit="s",
            is_stacked=True,
        ),
        Panel(
            title="Duration of requests",
            question="How long do whole answers take?",
            queries=quantiles("dspark_request_duration_seconds"),
            unit="s",
        ),
    ),
)

_WORK = Row(
    title="How much is done?",
    panels=(
        Panel(
            title="Requests by status",
            question="How many requests end each second, and how?",
            queries=(Query(expr=occurring("dspark_requests_total", by="code"), legend="{{code}}"),),
            unit="reqps",
            is_stacked=True,
        ),
        Panel(
            title="Tokens in and out",
            question="How many prompt tokens come in and how many tokens go out each second?",
            queries=(
                Query(expr=rate("dspark_prompt_tokens_total"), legend="prompts"),
                Query(expr=rate("dspark_generation_tokens_total"), legend="generated"),
            ),
            unit="short",
        ),
        Panel(
            title="In flight and waiting",
            question="Do requests pile up? Those that wait have no place on workers yet.",
            queries=(
                Query(expr="sum(dspark_requests_in_flight)", legend="in flight"),
                Query(expr="sum(dspark_router_queue_requests)", legend="waiting"),
            ),
            unit="short",
            runbook="DSparkQueueGrowing",
        ),
    ),
)

_FAILURES = Row(
    title="What fails, and is it noticed?",
    panels=(
        Panel(
            title="Failures by reason",
            question="Why do requests end with an error? Refusals and clients' mistakes are among them.",
            queries=(
                Query(
                    expr=occurring("dspark_request_errors_total", by="reason"),
                    legend="{{reason}}",
                ),
            ),
            unit="reqps",
            width=6,
            runbook="DSparkErrorBudgetBurnFast",
        ),
        Panel(
            title="Endings",
            question="Do answers end by themselves, by their length, by their client or by an error?",
            queries=(
                Query(expr=rate("dspark_request_finished_total", by="reason"), legend="{{reason}}"),
            ),
            unit="reqps",
            is_stacked=True,
            width=6,
        ),
        Panel(
            title="Placed again",
            question="Do requests lose their workers and go on elsewhere? A client sees a pause, no error.",
            queries=(
                Query(
                    expr=occurring("dspark_router_retries_total", by="reason"),
                    legend="{{reason}}",
                ),
            ),
            unit="reqps",
            width=6,
            runbook="DSparkWorkerFlapping",
        ),
        Panel(
            title="Workers by state",
            question="Which workers can the router use? `unknown` has not answered yet, `draining` finishes what it has.",
            queries=(
                Query(expr="max by (role, state) (dspark_workers)", legend="{{role}} {{state}}"),
                Query(
                    expr="sum(increase(dspark_router_ejections_total[$__rate_interval]))",
                    legend="lost",
                ),
            ),
            unit="short",
            width=6,
            runbook="DSparkNoReadyPrefill",
        ),
    ),
)

OVERVIEW = Dashboard(
    name="overview",
    title="Overview",
    about="Does it serve, how does it feel to users, and what fails?",
    rows=(HEADLINES, _USERS, _WORK, _FAILURES),
)
