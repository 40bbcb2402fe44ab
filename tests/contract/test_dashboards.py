"""The committed dashboards: what Grafana needs of them, what a reader needs, and that they ask for what exists."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.promql import misused, undeclared
from tools.dashboards.__main__ import FOLDER, drift, text_of
from tools.dashboards.boards import DASHBOARDS
from tools.dashboards.filters import filtered
from tools.observe.expressions import (
    Expression,
    dashboard_expressions,
    dashboard_files,
    substituted,
)
from tools.observe.prometheus import missing_tools

Json = dict[str, Any]

RUNBOOKS = Path(__file__).resolve().parents[2] / "docs" / "runbooks.md"
UNITS = {"s", "percentunit", "bytes", "Bps", "reqps", "ops", "short"}
"""Of Grafana's many; a name that it does not know is shown as text behind the figure."""
FILTERS = {"namespace", "model", "role", "pod"}
VALUES = dict.fromkeys(FILTERS, ".*") | {"__rate_interval": "1m", "__range": "1h"}

BOARDS = [pytest.param(json.loads(path.read_text()), id=path.stem) for path in dashboard_files()]
each_board = pytest.mark.parametrize("board", BOARDS)


def test_what_is_committed_is_what_the_code_gives() -> None:
    fresh = {f"{board.name}.json": text_of(board) for board in DASHBOARDS}
    assert drift(fresh, FOLDER) == [], "run `make dashboards`"


def test_drift_is_a_file_that_is_missing_superfluous_or_different(tmp_path: Path) -> None:
    for name in ("same", "other", "old"):
        (tmp_path / f"{name}.json").write_text("{}")
    fresh = {"same.json": "{}", "other.json": "[]", "new.json": "{}"}
    assert drift(fresh, tmp_path) == ["new.json", "old.json", "other.json"]


def test_there_are_four_with_lasting_addresses() -> None:
    addresses = {path.stem: json.loads(path.read_text())["uid"] for path in dashboard_files()}
    assert addresses == {
        name: f"dspark-{name}" for name in ("overview", "prefill", "decode", "capacity")
    }


@each_board
def test_a_dashboard_can_be_imported_anywhere(board: Json) -> None:
    assert board["id"] is None
    assert board["schemaVersion"] >= 39
    assert board["time"] == {"from": "now-1h", "to": "now"}
    assert board["refresh"] == "30s"
    assert set(_datasources(board)) == {"${datasource}"}, (
        "a fixed data source exists in one Grafana only"
    )


@each_board
def test_a_dashboard_can_be_narrowed_and_left(board: Json) -> None:
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables.keys() >= FILTERS
    assert {link["type"] for link in board["links"]} == {"dashboards", "link"}
    for name in FILTERS:
        assert variables[name]["multi"] and variables[name]["includeAll"]
        assert list(undeclared(variables[name]["definition"])) == []


@each_board
def test_every_panel_asks_a_question_and_answers_it_in_a_unit(board: Json) -> None:
    for panel in _panels(board):
        title = panel["title"]
        assert "?" in panel["description"], title
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] in UNITS, title
        steps = defaults["thresholds"]["steps"]
        assert steps[0]["value"] is None, title
        values = [step["value"] for step in steps[1:]]
        assert values == sorted(values), title
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(letters) == len(set(letters)), title


@each_board
def test_no_question_is_asked_twice_and_no_panel_covers_another(board: Json) -> None:
    panels = board["panels"]
    for field in ("id", "title"):
        values = [panel[field] for panel in panels]
        assert len(values) == len(set(values)), field
    cells = [cell for panel in panels for cell in _cells(panel["gridPos"])]
    assert len(cells) == len(set(cells))
    assert max(column for column, _ in cells) < 24


@each_board
def test_links_to_runbooks_lead_somewhere(board: Json) -> None:
    sections = {name.lower() for name in re.findall(r"^## (\w+)$", RUNBOOKS.read_text(), re.M)}
    links = [link["url"] for panel in _panels(board) for link in panel["links"]]
    assert links
    for link in links:
        base, _, section = link.partition("#")
        assert base == "${runbooks}"
        assert section in sections, link


@each_board
def test_expressions_name_only_what_is_declared_with_labels_that_it_has(board: Json) -> None:
    text = " ".join(_expressions(board))
    assert list(undeclared(text)) == []
    assert list(misused(text)) == []


@each_board
def test_every_expression_can_be_narrowed(board: Json) -> None:
    for expr in _expressions(board):
        if "dspark:threshold:" not in expr:
            assert '=~"$namespace"' in expr, expr
        assert not re.search(r"\[\d+[smhd]\]", expr), f"not of the time shown: {expr}"


def test_a_worker_is_narrowed_by_its_role_and_a_router_is_not_hidden_by_it() -> None:
    narrow = filtered('rate(dspark_kv_leases{role="prefill"}[1m]) / dspark_requests_in_flight')
    assert narrow == (
        'rate(dspark_kv_leases{role="prefill", namespace=~"$namespace", model=~"$model", role=~"$role", '
        'pod=~"$pod"}[1m]) / dspark_requests_in_flight{namespace=~"$namespace", model=~"$model"}'
    )
    with pytest.raises(KeyError, match="dspark_no_such"):
        filtered("sum(dspark_no_such)")


def test_variables_are_replaced_as_grafana_does_it() -> None:
    assert substituted('a{b=~"$pod"}[${__range}]', VALUES) == 'a{b=~".*"}[1h]'
    with pytest.raises(KeyError, match="unheard_of"):
        substituted("a[$unheard_of]", VALUES)


@pytest.mark.skipif(
    "promtool" in missing_tools(), reason="promtool is not here; Debian's package is prometheus"
)
def test_prometheus_can_read_every_expression(tmp_path: Path) -> None:
    expressions = tuple(dashboard_expressions(VALUES))
    assert _refusal_of(expressions, tmp_path) == ""
    broken = Expression(where="x", expr="sum by (le (dspark_step_rows_bucket)")
    assert "could not parse expression" in _refusal_of((*expressions, broken), tmp_path)


def _refusal_of(expressions: Iterable[Expression], folder: Path) -> str:
    """What promtool says against expressions, written as rules because it reads those."""
    rules = [
        {"record": f"panel:{number}", "expr": expression.expr}
        for number, expression in enumerate(expressions)
    ]
    path = folder / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    command = ["promtool", "check", "rules", "--lint=none", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ended.stdout + ended.stderr if ended.returncode else ""


def _panels(board: Json) -> Iterator[Json]:
    return (panel for panel in board["panels"] if panel["type"] != "row")


def _expressions(board: Json) -> Iterator[str]:
    return (target["expr"] for panel in _panels(board) for target in panel["targets"])


def _datasources(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "datasource" in value:
            yield value["datasource"]["uid"]
        yield from itertools.chain.from_iterable(map(_datasources, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(_datasources, value))


def _cells(position: dict[str, int]) -> Iterator[tuple[int, int]]:
    columns = range(position["x"], position["x"] + position["w"])
    lines = range(position["y"], position["y"] + position["h"])
    return itertools.product(columns, lines)
