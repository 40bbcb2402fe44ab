"""A real Prometheus watches three real processes under load, with the chart's rules, and is asked the dashboards' questions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from common.checkpoint.folder import DEFAULT_MODEL
from tools.dashboards.filters import families
from tools.observe.expressions import rule_files, rules
from tools.observe.findings import documented, examine
from tools.observe.prometheus import (
    QueryRefused,
    missing_tools,
    running_prometheus,
)
from tools.observe.still import AT_START, BEYOND_LOAD
from tools.observe.watch import Watched, watch

LOAD_S = 12.0
"""`make observe` takes a minute."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_tools()), reason="there is no Prometheus here; Debian's package is prometheus"
    ),
]


@pytest.fixture(scope="module")
def watched() -> Watched:
    return asyncio.run(watch(DEFAULT_MODEL, seconds=LOAD_S, interval_s=0.5))


def test_every_documented_family_is_shown(watched: Watched) -> None:
    assert watched.findings.absent == ()


def test_every_family_has_moved_that_a_start_and_load_can_move(watched: Watched) -> None:
    assert watched.findings.unmoved == ()


def test_every_panel_of_every_dashboard_shows_a_figure(watched: Watched) -> None:
    assert watched.findings.num_panel_expressions > 100
    assert watched.findings.empty_panels == ()


def test_every_rule_is_evaluated_and_looks_at_something(watched: Watched) -> None:
    assert watched.findings.failing == ()
    assert watched.findings.empty_rules == ()


def test_what_was_altered_on_the_way_raises_its_alert_and_no_other_fires(watched: Watched) -> None:
    """The cluster alters one write on purpose. Its alert waits for a minute, so it is pending here."""
    alerts = dict(alert.split() for alert in watched.findings.alerts)
    assert alerts.pop("DSparkHandoffCorrupted") in ("pending", "firing")
    assert "firing" not in alerts.values(), alerts


def test_no_client_noticed_anything(watched: Watched, figure: Callable[[str], None]) -> None:
    assert set(watched.endings) <= {"stop", "length", "left", "refused"}
    assert watched.endings["refused"] and watched.endings["left"]
    figure(f"watched by Prometheus: {watched.endings.total()} requests in {LOAD_S:.0f} s")


def test_families_that_stand_still_are_declared_and_have_one_reason() -> None:
    assert AT_START.keys() | BEYOND_LOAD.keys() <= families().keys()
    assert not AT_START.keys() & BEYOND_LOAD.keys()


def test_a_prometheus_that_watches_nothing_finds_everything_wrong() -> None:
    """Else findings without fault would say nothing."""
    with running_prometheus(rules=rule_files()) as server:
        findings = examine(server, namespace="", model="")
    names = {family.name for family in documented()}
    assert set(findings.absent) == names
    assert set(findings.unmoved) == names - BEYOND_LOAD.keys()
    # What is the same everywhere is there: thresholds, and zeros that stand for nothing.
    assert len(findings.empty_panels) > 0.8 * findings.num_panel_expressions
    assert {line.split(":")[0] for line in findings.empty_rules} >= {
        rule["alert"] for rule in rules() if "alert" in rule
    }


def test_a_figure_that_is_not_there_and_a_question_that_is_none_are_told_apart() -> None:
    with running_prometheus() as server:
        assert server.has_figures("vector(1)")
        assert not server.has_figures("dspark_nothing")
        assert not server.has_figures("vector(0) / 0")
        with pytest.raises(QueryRefused, match="parse error"):
            server.query("sum by (")
