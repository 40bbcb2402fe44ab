"""What a Prometheus that watched a cluster can and cannot say. Knows expressions and series; starts nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from common.telemetry.metrics.families import Family
from common.telemetry.metrics.vllm import ALIASES
from tools.dashboards.filters import families
from tools.observe.expressions import Expression, dashboard_expressions, rule_expressions
from tools.observe.prometheus import Prometheus, QueryRefused
from tools.observe.still import AT_START, BEYOND_LOAD

RANGE = "1h"
"""Longer than any run: what Grafana would put for the time shown, and how far back is looked for changes."""
RATE_INTERVAL = "5m"
"""What Grafana would put for `$__rate_interval` where scrapes are a minute apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was looked for, and what is wrong with it: nothing, in a good run."""

    num_families: int
    num_movable: int
    num_panel_expressions: int
    num_rules: int
    absent: tuple[str, ...]
    """Declared families that no process showed."""
    unmoved: tuple[str, ...]
    """Families that load should have moved, or a start, and that stayed as they were."""
    empty_panels: tuple[str, ...]
    """Panels' expressions without a single number, or refused."""
    empty_rules: tuple[str, ...]
    failing: tuple[str, ...]
    """Rules that Prometheus could not evaluate."""
    alerts: tuple[str, ...]
    """Alerts that fire, or are about to."""

    @property
    def faults(self) -> tuple[str, ...]:
        """A line for each thing that is wrong."""
        return (
            *(f"not shown: {name}" for name in self.absent),
            *(f"not moved: {name}" for name in self.unmoved),
            *self.empty_panels,
            *self.empty_rules,
            *self.failing,
        )


def examine(server: Prometheus, *, namespace: str, model: str) -> Findings:
    """Ask for every family, every panel's expression and every rule."""
    declared = documented()
    panels = tuple(dashboard_expressions(_variables(namespace, model)))
    rules = server.rules()
    return Findings(
        num_families=len(declared),
        num_movable=len(declared) - len(BEYOND_LOAD),
        num_panel_expressions=len(panels),
        num_rules=len(rules),
        absent=tuple(one.name for one in declared if not server.query(_series_of(one))),
        unmoved=tuple(_unmoved(server, declared)),
        empty_panels=tuple(_empty(server, panels)),
        empty_rules=tuple(_empty(server, rule_expressions())),
        failing=tuple(
            f"{rule.name}: {rule.health} {rule.error}" for rule in rules if rule.health != "ok"
        ),
        alerts=tuple(
            f"{rule.name} {rule.state}"
            for rule in rules
            if rule.is_alert and rule.state != "inactive"
        ),
    )


def documented() -> tuple[Family, ...]:
    """Every family, and those that are shown once more under vLLM's names."""
    own = families()
    aliases = (replace(own[name], name=alias) for alias, name in ALIASES.items())
    return (*own.values(), *aliases)


def _variables(namespace: str, model: str) -> dict[str, str]:
    """The dashboards' filters with something chosen, as far as one choice can show every panel."""
    return {
        "namespace": namespace,
        "model": model,
        "role": ".*",
        "pod": ".*",
        "__rate_interval": RATE_INTERVAL,
        "__range": RANGE,
    }


def _unmoved(server: Prometheus, declared: Iterable[Family]) -> Iterator[str]:
    for family in declared:
        series = _series_of(family)
        if family.name in AT_START:
            is_good = _is_positive(server, f"sum({series})")
        else:
            # How often any of its series had another value than before.
            is_good = family.name in BEYOND_LOAD or _is_positive(
                server, f"sum(changes({series}[{RANGE}]))"
            )
        if not is_good:
            yield family.name


def _is_positive(server: Prometheus, expr: str) -> bool:
    return any(series.value > 0 for series in server.query(expr))


def _series_of(family: Family) -> str:
    return f"{family.name}_count" if family.kind == "histogram" else family.name


def _empty(server: Prometheus, expressions: Iterable[Expression]) -> Iterator[str]:
    for expression in expressions:
        try:
            if not server.has_figures(expression.expr):
                yield f"{expression.where}: no figure from {expression.expr}"
        except QueryRefused as refusal:
            yield f"{expression.where}: {refusal} in {expression.expr}"
