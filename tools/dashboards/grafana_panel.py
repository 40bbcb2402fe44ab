"""Panels as Grafana's JSON. Knows its schema; not what is measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.dashboards.filters import filtered
from tools.dashboards.panels import Panel, Query

Json = dict[str, Any]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
RUNBOOKS = "${runbooks}"


def panel_json(panel: Panel, number: int, position: Json) -> Json:
    """One panel at its place."""
    return {
        "type": {"bars": "bargauge"}.get(panel.kind, panel.kind),
        "id": number,
        "title": panel.title,
        "description": panel.question,
        "gridPos": position,
        "datasource": DATASOURCE,
        "links": _runbook_links(panel),
        "targets": [
            _target(panel, query, chr(ord("A") + index))
            for index, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": list(_overrides(panel))},
        "options": _OPTIONS[panel.kind],
    }


def _target(panel: Panel, query: Query, letter: str) -> Json:
    is_momentary = panel.kind in ("stat", "bars", "table")
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": filtered(query.expr),
        "legendFormat": query.legend or "__auto",
        "format": {"heatmap": "heatmap", "table": "table"}.get(panel.kind, "time_series"),
        "instant": is_momentary,
        "range": not is_momentary,
    }


def _defaults(panel: Panel) -> Json:
    defaults: Json = {
        "unit": panel.unit,
        "min": 0,
        "color": {"mode": "thresholds" if panel.kind in ("stat", "bars") else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": _steps(panel)},
        "custom": _custom(panel),
        "noValue": "–",
    }
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    return defaults


def _steps(panel: Panel) -> list[Json]:
    """Grafana wants them rising, the first from minus infinity on."""
    if panel.bad_below is not None:
        return [{"color": "red", "value": None}, {"color": "green", "value": panel.bad_below}]
    steps: list[Json] = [{"color": "green", "value": None}]
    for colour, value in (("yellow", panel.warn), ("red", panel.bad)):
        if value is not None:
            steps.append({"color": colour, "value": value})
    return steps


def _custom(panel: Panel) -> Json:
    if panel.kind != "timeseries":
        return {}
    has_threshold = (panel.warn, panel.bad, panel.bad_below) != (None, None, None)
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.is_stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if has_threshold else "off"},
    }


def _overrides(panel: Panel) -> Iterator[Json]:
    for query in panel.queries:
        if query.is_limit:
            yield {
                "matcher": {"id": "byName", "options": query.legend},
                "properties": [
                    {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
                    {"id": "custom.fillOpacity", "value": 0},
                    {"id": "custom.stacking", "value": {"mode": "none", "group": "B"}},
                    {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
                ],
            }


_OPTIONS: dict[str, Json] = {
    "timeseries": {
        "legend": {
            "displayMode": "table",
            "placement": "bottom",
            "showLegend": True,
            "calcs": ["lastNotNull", "max"],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "auto",
    },
    "bars": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "displayMode": "basic",
        "orientation": "horizontal",
        "showUnfilled": True,
        "valueMode": "color",
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {"unit": "short"},
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 64, "exponent": 0.5},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "yHistogram": True},
        "yAxis": {"axisPlacement": "left"},
    },
    "table": {"showHeader": True, "cellHeight": "sm", "footer": {"show": False}},
}


def _runbook_links(panel: Panel) -> list[Json]:
    if not panel.runbook:
        return []
    url = f"{RUNBOOKS}#{panel.runbook.lower()}"
    return [{"title": f"Runbook: {panel.runbook}", "url": url, "targetBlank": True}]
