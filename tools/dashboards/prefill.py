"""Prefill workers: prompts, and what becomes of their state."""

from __future__ import annotations

from tools.dashboards.handoff import FAULTS, HANDOFFS, NETWORK
from tools.dashboards.panels import Dashboard, Panel, Query, Row
from tools.dashboards.promql import heat, per, quantiles, rate

ON_PREFILL = '{role="prefill"}'
PHASES = f"dspark_step_phase_seconds_total{ON_PREFILL}"

_PROMPTS = Row(
    title="Do prompts wait, and for what?",
    panels=(
        Panel(
            title="Waiting on prefill",
            question="Do prompts wait for room on a worker?",
            queries=(
                Query(expr=f"sum by (pod) (dspark_queue_requests{ON_PREFILL})", legend="{{pod}}"),
            ),
            unit="short",
            runbook="DSparkQueueGrowing",
        ),
        Panel(
            title="Tokens still to compute",
            question="How much work lies before each worker, in prompt tokens?",
            queries=(
                Query(
                    expr=f"sum by (pod) (dspark_queue_uncached_tokens{ON_PREFILL})",
                    legend="{{pod}}",
                ),
            ),
            unit="short",
        ),
        Panel(
            title="Wait before the first step",
            question="How long does a prompt lie on a worker before the engine takes it up?",
            queries=quantiles("dspark_queue_duration_seconds", ON_PREFILL),
            unit="s",
        ),
        Panel(
            title="Prompt tokens a second",
            question="How fast are prompts computed, by worker? Repeated placements count again.",
            queries=(
                Query(
                    expr=rate(f"dspark_prompt_tokens_computed_total{ON_PREFILL}", by="pod"),
                    legend="{{pod}}",
                ),
            ),
            unit="short",
        ),
        Panel(
            title="A prefill step's time by part",
            question="What does a step spend its time on? Means, one upon the other.",
            queries=(
                Query(
                    expr=per(PHASES, f"dspark_step_duration_seconds_count{ON_PREFILL}", by="phase"),
                    legend="{{phase}}",
                ),
            ),
            unit="s",
            is_stacked=True,
        ),
        Panel(
            title="Rows of a prefill step",
            question="Are steps full? More rows in a step cost less each, up to `max_step_rows`.",
            queries=heat("dspark_step_rows", ON_PREFILL),
            unit="short",
            kind="heatmap",
        ),
    ),
)

PREFILL = Dashboard(
    name="prefill",
    title="Prefill & hand-off",
    about="Do prompts wait, how long does their state take to decode, and is everything given back?",
    rows=(_PROMPTS, HANDOFFS, NETWORK, FAULTS),
)
