"""What a dashboard consists of: rows of panels, each of which answers one question. Knows nothing of Grafana's JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["timeseries", "stat", "heatmap", "bars", "table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One PromQL expression. Every metric in it is narrowed to what the dashboard's filters name."""

    expr: str
    legend: str = ""
    is_limit: bool = False
    """Drawn as a dashed line: something that the others are held against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One question and what answers it."""

    title: str
    question: str
    queries: tuple[Query, ...]
    unit: str
    """Grafana's name of the unit: s, percentunit, bytes, Bps, reqps, short."""
    kind: Kind = "timeseries"
    width: int = 8
    """Of 24 columns."""
    height: int = 8
    is_stacked: bool = False
    decimals: int | None = None
    warn: float | None = None
    bad: float | None = None
    """From here on yellow and red."""
    bad_below: float | None = None
    maximum: float | None = None
    runbook: str = ""
    """The alert whose runbook says what to do when this looks wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels that belong together, under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One page of Grafana."""

    name: str
    """Its file, and with `dspark-` before it its lasting address."""
    title: str
    about: str
    rows: tuple[Row, ...]
