"""What was measured, and its arithmetic: medians, rates, shares of a link. Knows no engine; prints nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.cli.transfer_bench.patterns import Pattern, size_name

MEMCPY = "memcpy"
RAW_TCP = "raw_tcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One transfer."""

    seconds: float
    sender_cpu_s: float = 0.0
    receiver_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The median of equal transfers."""

    size_bytes: int
    seconds: float
    sender_cores: float
    """Cores that were busy meanwhile."""
    receiver_cores: float

    @classmethod
    def of(cls, size_bytes: int, samples: Sequence[Sample]) -> Rate:
        return cls(
            size_bytes=size_bytes,
            seconds=statistics.median(s.seconds for s in samples),
            sender_cores=statistics.median(s.sender_cpu_s / s.seconds for s in samples),
            receiver_cores=statistics.median(s.receiver_cpu_s / s.seconds for s in samples),
        )

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One run: every engine in every pattern, and what they are compared with."""

    is_one_host: bool
    """Both ends are processes of this machine, so that shared memory is the fastest link."""
    memcpy: Mapping[int, Rate]
    """By size in bytes."""
    raw_tcp: Mapping[int, Rate]
    engines: Mapping[str, Mapping[Pattern, Rate]]
    missing: Mapping[str, str]
    """Why an engine was not measured."""

    def over_memcpy(self, engine: str, pattern: Pattern) -> float:
        rate = self.engines[engine][pattern].bytes_per_s
        return rate / self.memcpy[pattern.size_bytes].bytes_per_s

    def over_raw_tcp(self, engine: str, pattern: Pattern) -> float:
        rate = self.engines[engine][pattern].bytes_per_s
        return rate / self.raw_tcp[pattern.size_bytes].bytes_per_s

    def uses_memory(self, engine: str) -> bool:
        """True when its link is the machine's memory and not a network."""
        return self.is_one_host and engine == "nixl"

    def link_share(self, engine: str, pattern: Pattern) -> float:
        """Of the link that the engine has: memory, or a TCP connection."""
        share = self.over_memcpy if self.uses_memory(engine) else self.over_raw_tcp
        return share(engine, pattern)

    def figures(self) -> dict[str, float]:
        """Every figure by a flat name."""
        figures: dict[str, float] = {}
        for name, rates in ((MEMCPY, self.memcpy), (RAW_TCP, self.raw_tcp)):
            for size_bytes, rate in rates.items():
                figures[f"{name}.{size_name(size_bytes)}.bytes_per_s"] = rate.bytes_per_s
        for engine, by_pattern in self.engines.items():
            for pattern, rate in by_pattern.items():
                prefix = f"{engine}.{pattern.name}"
                figures |= {
                    f"{prefix}.bytes_per_s": rate.bytes_per_s,
                    f"{prefix}.over_memcpy": self.over_memcpy(engine, pattern),
                    f"{prefix}.over_raw_tcp": self.over_raw_tcp(engine, pattern),
                    f"{prefix}.sender_cores": rate.sender_cores,
                    f"{prefix}.receiver_cores": rate.receiver_cores,
                }
        return figures
