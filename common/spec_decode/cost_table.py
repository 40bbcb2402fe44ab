"""How long a step takes by its number of rows. Knows measurements; takes none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Measured seconds of a step at some row counts, non-decreasing; `of` makes one from raw measurements."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.seconds):
            raise ConfigError(
                f"a cost table has {len(self.rows)} row counts and {len(self.seconds)} times; "
                "give at least one of each and as many of both"
            )
        if self.rows[0] < 1 or any(b <= a for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ConfigError(f"a cost table's row counts must rise from 1 or more: {self.rows}")
        falls = any(b < a for a, b in zip(self.seconds, self.seconds[1:], strict=False))
        if not self.seconds[0] > 0.0 or falls:
            raise ConfigError(f"a cost table's times must be positive and not fall: {self.seconds}")

    @classmethod
    def of(cls, measurements: Iterable[tuple[int, float]]) -> CostTable:
        """From (rows, seconds) in any order; a time below that of fewer rows is noise and is raised to it."""
        ordered = sorted(dict(measurements).items())
        return cls(
            rows=tuple(rows for rows, _ in ordered),
            seconds=tuple(accumulate((seconds for _, seconds in ordered), max)),
        )

    def step_s(self, rows: int) -> float:
        """Seconds of a step with this many rows."""
        return float(self.steps_s(np.asarray([rows]))[0])

    def steps_s(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of a step for each row count: linear between measurements, flat below the first.

        Above the last it goes on with the slope from the first measurement to the last, which a single noisy
        measurement moves least; a table of one entry is flat.
        """
        seconds = np.interp(rows, self.rows, self.seconds)
        if len(self.rows) == 1:
            return seconds
        slope = (self.seconds[-1] - self.seconds[0]) / (self.rows[-1] - self.rows[0])
        return seconds + slope * np.maximum(rows - self.rows[-1], 0)
