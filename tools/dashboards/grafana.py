"""Dashboards as Grafana's JSON. Knows its schema; not what is measured."""

from __future__ import annotations

from collections.abc import Iterator

from tools.dashboards.filters import FILTERED_FAMILY, FILTERS, filtered
from tools.dashboards.grafana_panel import DATASOURCE, RUNBOOKS, Json, panel_json
from tools.dashboards.panels import Dashboard, Row

SCHEMA_VERSION = 39
COLUMNS = 24
RUNBOOKS_DEFAULT = "docs/runbooks.md"
"""The chart puts its `runbookUrl` in this place."""
STARTS = (
    "(changes(process_start_time_seconds[$__rate_interval]) > 0)"
    " * on (instance) group_left (role) dspark_build_info"
)


def dashboard_json(dashboard: Dashboard) -> Json:
    """What Grafana imports, and what a provisioned file holds."""
    return {
        "annotations": {"list": [_starts()]},
        "description": dashboard.about,
        "editable": False,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": _links(),
        "panels": list(_panels(dashboard.rows)),
        "refresh": "30s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["dspark"],
        "templating": {"list": _variables()},
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": f"DSpark / {dashboard.title}",
        "uid": f"dspark-{dashboard.name}",
        "version": 1,
        "weekStart": "",
    }


def _panels(rows: tuple[Row, ...]) -> Iterator[Json]:
    top = number = 0
    for row in rows:
        number += 1
        yield _heading(row, number, top)
        top += 1
        left = tallest = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, tallest = top + tallest, 0, 0
            number += 1
            position = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            yield panel_json(panel, number, position)
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest


def _heading(row: Row, number: int, top: int) -> Json:
    return {
        "type": "row",
        "id": number,
        "title": row.title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
        "panels": [],
    }


def _variables() -> list[Json]:
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {},
            "hide": 0,
            "includeAll": False,
            "multi": False,
            "options": [],
            "refresh": 1,
            "regex": "",
        },
        *(_filter(name, FILTERS[:index]) for index, name in enumerate(FILTERS)),
        {
            "name": "runbooks",
            "type": "constant",
            "hide": 2,
            "query": RUNBOOKS_DEFAULT,
            "current": {"text": RUNBOOKS_DEFAULT, "value": RUNBOOKS_DEFAULT, "selected": True},
            "skipUrlSync": True,
        },
    ]


def _filter(name: str, wider: tuple[str, ...]) -> Json:
    """A choice among a label's values, within what the filters before it chose; everything is chosen at first."""
    within = ", ".join(f'{one}=~"${one}"' for one in wider)
    series = f"{FILTERED_FAMILY}{{{within}}}" if within else FILTERED_FAMILY
    query = f"label_values({series}, {name})"
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "current": {"text": ["All"], "value": ["$__all"], "selected": True},
        # Empty labels are matched too: a Prometheus outside a cluster adds neither namespace nor pod.
        "allValue": ".*",
        "includeAll": True,
        "multi": True,
        "hide": 0,
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
    }


def _links() -> list[Json]:
    return [
        {
            "title": "DSpark",
            "type": "dashboards",
            "tags": ["dspark"],
            "asDropdown": False,
            "includeVars": True,
            "keepTime": True,
            "targetBlank": False,
        },
        {
            "title": "Runbooks",
            "type": "link",
            "icon": "doc",
            "url": RUNBOOKS,
            "tags": [],
            "targetBlank": True,
        },
    ]


def _starts() -> Json:
    """A mark where a process began."""
    return {
        "name": "Starts",
        "datasource": DATASOURCE,
        "enable": True,
        "expr": filtered(STARTS),
        "iconColor": "blue",
        "titleFormat": "{{role}} {{pod}} started",
        "step": "30s",
    }
