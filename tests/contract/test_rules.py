"""Recording rules and alerts as Prometheus's own tool sees them, and the runbooks that belong to them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.telemetry.metrics.router import error_reasons
from tests.support.chart import rendered_text, requires_helm
from tests.support.promql import misused, undeclared
from tools.observe.expressions import always_answered, dashboard_files, rule_files, rules
from tools.observe.prometheus import missing_tools

ROOT = Path(__file__).resolve().parents[2]
RUNBOOKS = ROOT / "docs" / "runbooks.md"
CASES = tuple(sorted(Path(__file__).with_name("rules").glob("*.yaml")))
SEVERITIES = ("critical", "warning")

needs_promtool = pytest.mark.skipif(
    "promtool" in missing_tools(), reason="promtool is not here; Debian's package is prometheus"
)


@needs_promtool
def test_prometheus_accepts_every_rule() -> None:
    promtool("check", "rules", *map(str, rule_files()))


@needs_promtool
@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_alerts_fire_and_end_when_they_should_and_say_what_they_should(cases: Path) -> None:
    promtool("test", "rules", str(cases))


@needs_promtool
def test_the_cases_notice_an_alert_that_never_fires(tmp_path: Path) -> None:
    """Else a mistake in how the cases are run would look like success."""
    silenced = tmp_path / "alerts.yaml"
    text = next(path for path in rule_files() if path.name == "alerts.yaml").read_text()
    silenced.write_text(re.sub(r"for: \w+", "for: 30d", text))
    original = next(path for path in CASES if path.stem == "latency")
    document = yaml.safe_load(original.read_text())
    document["rule_files"] = [
        str(silenced if name.endswith(silenced.name) else (original.parent / name).resolve())
        for name in document["rule_files"]
    ]
    cases = tmp_path / "cases.yaml"
    cases.write_text(yaml.safe_dump(document))
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", str(cases))


def test_every_alert_has_a_case_in_which_it_fires_and_then_ends() -> None:
    assert {rule["alert"] for rule in alerts()} == set(alerts_that_fire_and_end())


def test_the_cases_evaluate_groups_in_a_fixed_order() -> None:
    """Else an alert would see recorded series of the minute before or of its own, by chance."""
    groups = [
        group["name"]
        for path in rule_files()
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    for path in CASES:
        assert sorted(yaml.safe_load(path.read_text())["group_eval_order"]) == sorted(groups)


def test_every_alert_says_how_bad_it_is_what_it_means_and_where_its_runbook_is() -> None:
    for rule in alerts():
        name = rule["alert"]
        assert rule["for"], name
        assert rule["labels"]["severity"] in SEVERITIES, name
        notes = rule["annotations"]
        assert set(notes) == {"summary", "description", "runbook_url"}, name
        assert notes["description"].endswith("."), name
        assert notes["runbook_url"] == f"docs/runbooks.md#{name.lower()}"


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    sections = re.findall(r"^## (DSpark\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(rule["alert"] for rule in alerts())


def test_every_runbook_says_what_users_notice_where_to_look_and_what_to_do() -> None:
    _, *sections = re.split(r"^## ", RUNBOOKS.read_text(), flags=re.MULTILINE)
    for section in sections:
        name = section.splitlines()[0]
        assert "**Says**" in section, name
        assert re.search(r"\*\*Look\b", section), name
        assert re.search(r"\*\*Do\b|do\*\* as for", section), name


@requires_helm
def test_links_to_runbooks_lead_to_where_the_chart_is_told_that_they_are() -> None:
    url = "https://wiki.example.com/dspark"
    enabled = {"enabled": True}
    text = rendered_text(
        values={"monitoring": {"runbookUrl": url, "prometheusRule": enabled, "dashboards": enabled}}
    )
    assert f"runbook_url: {url}#dsparknoreadydecode" in text
    assert f'"query": "{url}"' in text
    assert "docs/runbooks.md" not in text


def test_rules_and_runbooks_name_only_what_is_declared_with_labels_that_it_has() -> None:
    texts = {str(path): path.read_text() for path in (*rule_files(), RUNBOOKS)}
    assert [f"{path}: {what}" for path, text in texts.items() for what in undeclared(text)] == []
    assert [what for path in rule_files() for what in misused(path.read_text())] == []


def test_runbooks_name_only_reasons_that_errors_have_and_panels_that_are_there() -> None:
    text = RUNBOOKS.read_text()
    reasons = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", text))
    assert reasons
    assert reasons <= set(error_reasons())
    panels = set()
    for path in dashboard_files():
        board = json.loads(path.read_text())
        title = board["title"].removeprefix("DSpark / ")
        panels |= {title, *(name for panel in board["panels"] for name in _names(title, panel))}
    emphasized = re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", text)
    assert emphasized
    assert {" ".join(name.split()) for name in emphasized} <= panels


def test_wrong_names_labels_values_and_rates_of_gauges_are_found() -> None:
    text = (
        'dspark_nothing + rate(dspark_kv_leases{role="x", state="y"}[1m]) + dspark_requests_total '
        '+ dspark_workers{state=~"ready|steady"}'
    )
    assert list(undeclared(text)) == [
        "dspark_nothing",
        "dspark_kv_leases by state",
        "dspark_workers by state steady",
    ]
    assert list(misused(text)) == [
        "dspark_kv_leases is no counter, and has no rate",
        "dspark_requests_total is a counter, and says little but by its rate",
    ]


def test_everything_that_counts_failures_means_the_same_by_them() -> None:
    texts = [path.read_text() for path in (*rule_files(), *dashboard_files())]
    codes = set(re.findall(r'code=~\\?"([^"\\]+)', " ".join(texts)))
    assert codes == {"resource_exhausted|unavailable|aborted|internal|deadline_exceeded"}


def test_recorded_series_are_named_once_and_used() -> None:
    recorded = [rule["record"] for rule in rules() if "record" in rule]
    assert len(recorded) == len(set(recorded))
    asked = " ".join(rule["expr"] for rule in rules())
    assert set(re.findall(r"dspark:[\w:]+", asked)) <= set(recorded)


def test_comparisons_are_answered_and_label_matchers_left_alone() -> None:
    assert (
        always_answered('a{b!="c", d=~"e"} > 2 * b and c >= bool 1 == 3')
        == 'a{b!="c", d=~"e"} > bool 2 * b and c >= bool 1 == bool 3'
    )
    assert always_answered("absent(a)") == "count(a)"


def alerts() -> list[Mapping[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def alerts_that_fire_and_end() -> Iterator[str]:
    for path in CASES:
        for case in yaml.safe_load(path.read_text())["tests"]:
            courses: dict[str, list[bool]] = {}
            for asked in case["alert_rule_test"]:
                courses.setdefault(asked["alertname"], []).append(bool(asked["exp_alerts"]))
            yield from (name for name, course in courses.items() if course == [False, True, False])


def _names(board: str, panel: Mapping[str, Any]) -> tuple[str, str]:
    return panel["title"], f"{board} → {panel['title']}"


def promtool(*arguments: str) -> None:
    ended = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
