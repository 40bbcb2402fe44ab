"""Whether drafting pays. Rows of the decode page."""

from __future__ import annotations

from tools.dashboards.panels import Panel, Query, Row
from tools.dashboards.promql import heat, mean, per, quantiles, rate

ON_DECODE = '{role="decode"}'
DRAFTED = f"dspark_spec_draft_tokens_total{ON_DECODE}"
ACCEPTED = f"dspark_spec_accepted_tokens_total{ON_DECODE}"
ACCEPTED_BY_POSITION = f"dspark_spec_accepted_tokens_per_position_total{ON_DECODE}"
PREDICTED = f"dspark_spec_predicted_tokens_per_position_total{ON_DECODE}"
PHASES = f"dspark_step_phase_seconds_total{ON_DECODE}"
DRAFTING = 'dspark_step_phase_seconds_total{role="decode", phase="draft"}'
LENGTH = "dspark_spec_accepted_length"


def _by_position(counter: str) -> str:
    """Share of the drafts that were verified at each position, over the time that is shown."""
    verified = f"dspark_spec_draft_tokens_per_position_total{ON_DECODE}"
    return (
        f"sum by (position) (increase({counter}[$__range])) "
        f"/ (sum by (position) (increase({verified}[$__range])) > 0)"
    )


ACCEPTANCE = Row(
    title="Does speculation pay?",
    panels=(
        Panel(
            title="Tokens a round",
            question="How many tokens does one forward of the target bring? 1 is what it would bring without drafts.",
            queries=(Query(expr=mean(LENGTH, ON_DECODE), legend="accepted length"),),
            unit="short",
            decimals=2,
            runbook="DSparkAcceptanceCollapse",
        ),
        Panel(
            title="Accepted share of drafts",
            question="Which share of verified drafts is accepted, and what is usual here?",
            queries=(
                Query(expr=per(ACCEPTED, DRAFTED), legend="accepted"),
                Query(
                    expr="max(dspark:spec_acceptance:ratio5m_mean1d)",
                    legend="usual",
                    is_limit=True,
                ),
            ),
            unit="percentunit",
            maximum=1,
            runbook="DSparkAcceptanceCollapse",
        ),
        Panel(
            title="Accepted length by rounds since hand-off",
            question="Did the drafter's state survive the hand-off? If not, the first rounds are short and later ones recover.",
            queries=(
                Query(
                    expr=mean(LENGTH, ON_DECODE, by="rounds_since_handoff"),
                    legend="round {{rounds_since_handoff}}",
                ),
            ),
            unit="short",
            decimals=2,
            runbook="DSparkDrafterStateMissing",
        ),
        Panel(
            title="Accepted by position",
            question="How far do drafts hold? Share that was accepted at each position, over the time shown.",
            queries=(
                Query(
                    expr=_by_position(ACCEPTED_BY_POSITION),
                    legend="{{position}}",
                ),
            ),
            unit="percentunit",
            kind="bars",
            maximum=1,
            runbook="DSparkAcceptanceCollapse",
        ),
        Panel(
            title="Predicted by position",
            question="What did the drafter's calibrated confidence promise for each position? Equal to what was accepted "
            "when it is calibrated.",
            queries=(
                Query(
                    expr=_by_position(PREDICTED),
                    legend="{{position}}",
                ),
            ),
            unit="percentunit",
            kind="bars",
            maximum=1,
            runbook="DSparkAcceptanceCollapse",
        ),
        Panel(
            title="Predicted over accepted",
            question="Does the drafter promise what it keeps? Above 1 it is too sure of itself, and the schedule verifies too much.",
            queries=(
                Query(
                    expr=per(PREDICTED, ACCEPTED_BY_POSITION),
                    legend="predicted / accepted",
                ),
            ),
            unit="short",
            decimals=2,
            runbook="DSparkAcceptanceCollapse",
        ),
        Panel(
            title="Rounds by accepted length",
            question="Are most rounds of middling length, or some very long and some of one token?",
            queries=heat(LENGTH, ON_DECODE),
            unit="short",
            kind="heatmap",
        ),
        Panel(
            title="Acceptance of whole requests",
            question="Are there requests with next to none, whose drafter lost its state, or with all, which repeat themselves?",
            queries=quantiles("dspark_request_spec_acceptance_ratio", of=(0.1, 0.5, 0.9)),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            title="Cost of drafting",
            question="Which share of decode's step time goes into drafts?",
            queries=(
                Query(
                    expr=per(DRAFTING, PHASES),
                    legend="draft",
                ),
            ),
            unit="percentunit",
            maximum=1,
        ),
    ),
)

WINDOW = Row(
    title="What is drafted and not used?",
    panels=(
        Panel(
            title="Verified rows a request",
            question="How many rows does the schedule give a request's round? The newest token and its drafts.",
            queries=(
                Query(expr=mean("dspark_spec_verify_window_tokens", ON_DECODE), legend="mean"),
            ),
            unit="short",
            decimals=2,
        ),
        Panel(
            title="Drafts that were cut",
            question="How many drafts a second does the schedule leave unverified?",
            queries=(
                Query(
                    expr=rate(f"dspark_spec_cut_tokens_total{ON_DECODE}", by="pod"),
                    legend="{{pod}}",
                ),
            ),
            unit="short",
        ),
        Panel(
            title="Rounds without drafts",
            question="Why did rounds run with the target alone?",
            queries=(
                Query(
                    expr=rate(f"dspark_spec_draft_skipped_total{ON_DECODE}", by="reason"),
                    legend="{{reason}}",
                ),
                Query(expr=rate(f"dspark_spec_drafts_total{ON_DECODE}"), legend="with drafts"),
            ),
            unit="ops",
        ),
        Panel(
            title="Drafter state missing",
            question="Which share of requests began on decode without the prompt's drafter state?",
            queries=(
                Query(expr="max(dspark:drafter_state_missing:ratio15m)", legend="missing"),
                Query(
                    expr="max(dspark:threshold:drafter_state_missing_ratio)",
                    legend="alert",
                    is_limit=True,
                ),
            ),
            width=12,
            unit="percentunit",
            runbook="DSparkDrafterStateMissing",
        ),
        Panel(
            title="Starts without drafter state",
            question="How often, on which worker?",
            queries=(
                Query(
                    expr=rate(f"dspark_spec_drafter_fallbacks_total{ON_DECODE}", by="pod"),
                    legend="{{pod}}",
                ),
            ),
            width=12,
            unit="ops",
            runbook="DSparkDrafterStateMissing",
        ),
    ),
)
