"""What a process says of itself over HTTP, as Prometheus would ask. Knows the text format; no names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.support.http import get


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples of one answer."""

    samples: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]

    @classmethod
    def of(cls, port: int) -> Scrape:
        status, text = get(port, "/metrics")
        assert status == 200, text
        return cls(
            {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name with these labels, whatever their others; KeyError when there is none."""
        found = [
            value
            for (sample, has), value in self.samples.items()
            if sample == name and labels.items() <= dict(has).items()
        ]
        if not found:
            raise KeyError(f"{name} {labels}")
        return sum(found)

    def by(self, label: str, name: str) -> dict[str, float]:
        """The samples of that name, by one of their labels."""
        return {dict(has)[label]: v for (sample, has), v in self.samples.items() if sample == name}

    def has_moved(self, name: str, before: Scrape) -> bool:
        """Whether a family says anything else than before; a histogram, whether anything was observed."""
        return any(
            value != before.samples.get(sample, 0.0)
            for sample, value in self.samples.items()
            if sample[0] in (name, f"{name}_count")
        )
