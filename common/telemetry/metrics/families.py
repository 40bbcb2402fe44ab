"""How a metric is declared, once, with everything that a reader of it must know. Knows types and labels; no names.

Label values that are known beforehand are there from the start, at zero: a rate over a counter that appears with its
first event misses that event.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

Kind = Literal["counter", "gauge", "histogram"]

Values = Sequence[str] | None
"""A label's values; None where they are not known beforehand."""

Metric = TypeVar("Metric", Counter, Gauge, Histogram)

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
"""Waits and stages: from a hand-off on one host to a prompt of a million tokens."""


def process_registry() -> CollectorRegistry:
    """A registry with what the operating system knows of this process: CPU seconds, memory, open files."""
    # The time of creation of every child doubles the answer and is used by no query.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    # Described collectors can be asked for by name, as `?name[]=…` does.
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A metric as it is documented."""

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, Values]
    """The process's own labels first; their value is open here, though it never changes in one process."""
    buckets: tuple[float, ...] = ()


class Labelled(Generic[Metric]):
    """A metric with labels besides the process's own."""

    def __init__(self, metric: Metric, own: Mapping[str, str]) -> None:
        self._metric: Metric = metric
        self._own = own

    def labels(self, **values: str) -> Metric:
        """The child for these values; what is counted often keeps its child."""
        child: Metric = self._metric.labels(**self._own, **values)
        return child

    def children(self, label: str, values: Sequence[str]) -> dict[str, Metric]:
        """The children of a metric with this one label, by value."""
        return {value: self.labels(**{label: value}) for value in values}

    def remove(self, **values: str) -> None:
        """Forget all children with these values."""
        self._metric.remove_by_labels({**self._own, **values})

    def clear(self) -> None:
        """Forget all children."""
        self._metric.clear()


class Families:
    """Declares the metrics of one process; each carries the process's own labels, such as model and role."""

    def __init__(self, registry: CollectorRegistry, **own: str) -> None:
        self.registry = registry
        self.declared: list[Family] = []
        self.by_name: dict[str, Counter | Gauge | Histogram] = {}
        """Every metric that was declared."""
        self._own = own

    def counter(self, name: str, help: str) -> Counter:
        return self.counters(name, help).labels()

    def gauge(self, name: str, help: str) -> Gauge:
        return self.gauges(name, help).labels()

    def histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return self.histograms(name, help, buckets).labels()

    def counters(self, name: str, help: str, **labels: Values) -> Labelled[Counter]:
        assert name.endswith("_total"), f"counter {name} must end in _total"
        metric = Counter(name, help, self._names(labels), registry=self.registry)
        return self._declared(metric, name, "counter", help, labels)

    def gauges(self, name: str, help: str, **labels: Values) -> Labelled[Gauge]:
        metric = Gauge(name, help, self._names(labels), registry=self.registry)
        return self._declared(metric, name, "gauge", help, labels)

    def histograms(
        self, name: str, help: str, buckets: Sequence[float], **labels: Values
    ) -> Labelled[Histogram]:
        metric = Histogram(name, help, self._names(labels), registry=self.registry, buckets=buckets)
        return self._declared(metric, name, "histogram", help, labels, tuple(buckets))

    def _names(self, labels: Mapping[str, Values]) -> list[str]:
        return [*self._own, *labels]

    def _declared(
        self,
        metric: Metric,
        name: str,
        kind: Kind,
        help: str,
        labels: Mapping[str, Values],
        buckets: tuple[float, ...] = (),
    ) -> Labelled[Metric]:
        everything: dict[str, Values] = {**dict.fromkeys(self._own), **labels}
        self.declared.append(
            Family(name=name, kind=kind, help=help, labels=everything, buckets=buckets)
        )
        self.by_name[name] = metric
        labelled = Labelled(metric, self._own)
        known = [values for values in labels.values() if values is not None]
        if len(known) == len(labels):
            for combination in itertools.product(*known):
                labelled.labels(**dict(zip(labels, combination, strict=True)))
        return labelled
