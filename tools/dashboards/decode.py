"""Decode workers: how fast they run, and whether drafting pays."""

from __future__ import annotations

from tools.dashboards.panels import Dashboard, Panel, Query, Row
from tools.dashboards.promql import mean, per, quantiles, rate
from tools.dashboards.speculation import ACCEPTANCE, WINDOW

ON_DECODE = '{role="decode"}'
PHASES = f"dspark_step_phase_seconds_total{ON_DECODE}"

_PACE = Row(
    title="How fast does decode run?",
    panels=(
        Panel(
            title="Tokens a second",
            question="How many tokens does each worker bring, accepted drafts included?",
            queries=(
                Query(
                    expr=rate(f"dspark_tokens_sampled_total{ON_DECODE}", by="pod"),
                    legend="{{pod}}",
                ),
            ),
            unit="short",
            is_stacked=True,
        ),
        Panel(
            title="Time of a step",
            question="How long is one round of verification and drafting?",
            queries=quantiles("dspark_step_duration_seconds", ON_DECODE),
            unit="s",
            runbook="DSparkSlowTokens",
        ),
        Panel(
            title="A step's time by part",
            question="What does a step spend its time on? Means, one upon the other; they add up to the mean step.",
            queries=(
                Query(
                    expr=per(PHASES, f"dspark_step_duration_seconds_count{ON_DECODE}", by="phase"),
                    legend="{{phase}}",
                ),
            ),
            unit="s",
            is_stacked=True,
            runbook="DSparkSlowTokens",
        ),
        Panel(
            title="Requests and rows of a step",
            question="How large are batches, in requests and in rows to compute?",
            queries=(
                Query(expr=mean("dspark_step_batch_size", ON_DECODE), legend="requests"),
                Query(expr=mean("dspark_step_rows", ON_DECODE), legend="rows"),
            ),
            unit="short",
        ),
        Panel(
            title="Running and waiting on decode",
            question="How many requests does each worker run, and how many wait there for their state?",
            queries=(
                Query(
                    expr=f"sum by (pod) (dspark_running_requests{ON_DECODE})",
                    legend="{{pod}} running",
                ),
                Query(
                    expr=f"sum by (pod) (dspark_queue_requests{ON_DECODE})",
                    legend="{{pod}} waiting",
                ),
            ),
            unit="short",
        ),
        Panel(
            title="Wasted tokens",
            question="Which share of sampled tokens became part of no answer, because its request had ended?",
            queries=(
                Query(
                    expr=per(
                        f"dspark_tokens_discarded_total{ON_DECODE}",
                        f"dspark_tokens_sampled_total{ON_DECODE}",
                    ),
                    legend="discarded",
                ),
            ),
            unit="percentunit",
        ),
    ),
)

DECODE = Dashboard(
    name="decode",
    title="Decode & speculation",
    about="How fast does decode run, does speculation pay, and did the drafter survive the hand-off?",
    rows=(_PACE, ACCEPTANCE, WINDOW),
)
