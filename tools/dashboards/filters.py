"""How a dashboard's filters reach its expressions. Knows which labels each declared family has."""

from __future__ import annotations

import re

from common.telemetry.metrics import RouterMetrics, WorkerMetrics
from common.telemetry.metrics.families import Family

FILTERS = ("namespace", "model", "role", "pod")
FILTERED_FAMILY = "dspark_build_info"
"""Every process has it, with every label that can be filtered by."""

_NAME = re.compile(r"\b(?P<name>(?:dspark|process)[_:][a-z0-9_:]+)(?:\{(?P<matchers>[^{}]*)\})?")
_SUFFIXES = ("", "_bucket", "_sum", "_count")


def families() -> dict[str, Family]:
    """All families that router and workers declare, by name."""
    declared = (
        *RouterMetrics(model="").families,
        *WorkerMetrics(model="", role="").families,
    )
    return {family.name: family for family in declared}


def filtered(expr: str) -> str:
    """`expr` with every series narrowed to what the filters name, as far as it has their labels.

    Raises KeyError for a name that nothing declares.
    """

    def narrow(match: re.Match[str]) -> str:
        matchers = [*filter(None, [match["matchers"]]), *_scope(match["name"])]
        return f"{match['name']}{{{', '.join(matchers)}}}" if matchers else match["name"]

    return _NAME.sub(narrow, expr)


def _scope(name: str) -> list[str]:
    return [f'{label}=~"${label}"' for label in FILTERS if label in _filterable(name)]


def _filterable(name: str) -> frozenset[str]:
    """Namespace and pod come from the scrape. What a router says of its requests and workers is of no pod in particular."""
    if name.startswith("process_"):
        return frozenset({"namespace", "pod"})
    if name.startswith("dspark:"):
        return frozenset() if ":threshold:" in name else frozenset({"namespace", "model"})
    family = next((base for end in _SUFFIXES if (base := name.removesuffix(end)) in _LABELS), name)
    labels = _LABELS[family] | {"namespace"}
    return labels if family in _OF_ROUTERS else labels | {"pod"}


_LABELS = {name: frozenset(family.labels) for name, family in families().items()}
_OF_ROUTERS = frozenset(family.name for family in RouterMetrics(model="").families) - frozenset(
    family.name for family in WorkerMetrics(model="", role="").families
)
