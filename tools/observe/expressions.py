"""Every expression of the chart's dashboards and rules, ready to be asked. Knows their files; asks nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "helm" / "dspark"
DASHBOARDS = CHART / "dashboards"
RULES = CHART / "rules"

_COMPARISON = re.compile(r"\s(==|!=|>=|<=|>|<)\s+(?!bool\b)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """One PromQL expression and who wrote it."""

    where: str
    expr: str


def rule_files() -> tuple[Path, ...]:
    return tuple(sorted(RULES.glob("*.yaml")))


def dashboard_files() -> tuple[Path, ...]:
    return tuple(sorted(DASHBOARDS.glob("*.json")))


def dashboard_expressions(values: Mapping[str, str]) -> Iterator[Expression]:
    """What every panel asks when the dashboard's variables have these values; one without a value is a KeyError."""
    for path in dashboard_files():
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                where = f"{path.stem} / {panel['title']} / {target['refId']}"
                yield Expression(where=where, expr=substituted(target["expr"], values))


def substituted(expr: str, values: Mapping[str, str]) -> str:
    """Grafana's variables replaced, as Grafana does it before Prometheus sees the expression."""
    return re.sub(r"\$(\w+)|\$\{(\w+)\}", lambda match: values[match[1] or match[2]], expr)


def rules() -> Iterator[Mapping[str, Any]]:
    """All rules of all files."""
    for path in rule_files():
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def rule_expressions() -> Iterator[Expression]:
    """What every rule computes; an alert's conditions as 0 or 1 per series, since a healthy system fulfils none."""
    for rule in rules():
        if "alert" in rule:
            yield Expression(where=rule["alert"], expr=always_answered(rule["expr"]))
        else:
            yield Expression(where=rule["record"], expr=rule["expr"])


def always_answered(expr: str) -> str:
    """Comparisons give 0 where they would give nothing, and so does the absence of what is there.

    Comparisons are told from label matchers by the space around them.
    """
    return _COMPARISON.sub(r" \1 bool ", expr).replace("absent(", "count(")
