"""Reads names and labels out of PromQL and texts about it. Knows what the project declares; no grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator

from common.telemetry.metrics.families import Family
from tools.dashboards.filters import families

SCRAPED_LABELS = {"namespace", "pod", "instance", "job", "le"}
"""What Prometheus adds, or a histogram has."""

_SERIES = re.compile(r"\b(dspark_[a-z0-9_]+)(?:\{([^{}]*)\})?")
_MATCHER = re.compile(r"""(\w+)\s*(?:=~|!~|!=|=)\s*["']([^"']*)["']""")


_RATES = re.compile(r"\b(?:rate|increase)\((dspark_[a-z0-9_]+)")


def undeclared(text: str) -> Iterator[str]:
    """Metrics that no process has, labels that a metric has not, and values that a label never takes."""
    for name, matchers in _SERIES.findall(text):
        family = _family_of(name)
        if family is None:
            yield name
            continue
        for label, pattern in _MATCHER.findall(matchers):
            if label not in family.labels.keys() | SCRAPED_LABELS:
                yield f"{name} by {label}"
            known = family.labels.get(label)
            if known is not None and not pattern.startswith("$"):
                yield from (
                    f"{name} by {label} {value}"
                    for value in pattern.split("|")
                    if value not in known
                )


def misused(text: str) -> Iterator[str]:
    """Rates of what goes up and down, and counters that are taken as they are."""
    for name in _RATES.findall(text):
        family = _family_of(name)
        if family is not None and family.kind == "gauge":
            yield f"{name} is no counter, and has no rate"
    for name, _ in _SERIES.findall(_RATES.sub("", text)):
        family = _family_of(name)
        if family is not None and family.kind != "gauge":
            yield f"{name} is a counter, and says little but by its rate"


def _family_of(name: str) -> Family | None:
    for suffix in ("", "_bucket", "_sum", "_count"):
        if name.endswith(suffix) and name.removesuffix(suffix) in _DECLARED:
            return _DECLARED[name.removesuffix(suffix)]
    return None


_DECLARED = families()
