"""Metrics as tests ask for them: a name and the labels that matter."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry


def figure(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """The sum of all samples of that name with these labels, whatever their others. KeyError when there is none."""
    found = [
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name and _has(sample.labels, labels)
    ]
    if not found:
        raise KeyError(f"{name} {labels}")
    return sum(found)


def _has(sample: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(sample.get(name) == value for name, value in wanted.items())
