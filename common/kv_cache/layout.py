"""The cache contract: which rows exist and how positions address them. Knows no storage and no model.

Position is the only address. Row `w` of a region stands for positions `w * ratio … w * ratio + ratio - 1`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from common.errors import ContractMismatch

PAGE_TOKENS = 128
"""Positions that a page covers: the least common multiple of the compression ratios."""


DRAFTER_REGION = "drafter"

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""By the names of types that rows may have."""


class Retention(enum.Enum):
    """How a region's rows are kept."""

    PAGED = "paged"
    RING = "ring"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Rows of one kind. Everything here is contract; page counts and ring sizes are private storage."""

    name: str
    layer_ids: tuple[int, ...]
    ratio: int
    """Positions per row."""
    row_width: int
    dtype: str
    retention: Retention
    window_rows: int = 0
    """Newest rows that a reader may look back on; 0 for paged regions, which keep all."""
    tail_group: int = 0
    """Positions of a compression group for regions that keep its open tail; 0 elsewhere."""

    def live_rows(self, num_tokens: int) -> range:
        """Rows that continue a request whose first `num_tokens` positions are computed; what a hand-off moves."""
        if self.retention is Retention.PAGED:
            return range(0, num_tokens // self.ratio)
        if self.tail_group:
            open_group = num_tokens // self.tail_group * self.tail_group
            return range(max(0, open_group - (self.window_rows - self.tail_group)), num_tokens)
        return range(max(0, num_tokens - self.window_rows), num_tokens)

    def closed_rows(self, num_tokens: int) -> range:
        """Rows of whole pages among the first `num_tokens` positions; nothing rewrites them."""
        if self.retention is Retention.RING:
            return range(0)
        return range(0, num_tokens // PAGE_TOKENS * self.rows_per_page)

    @property
    def row_bytes(self) -> int:
        return self.row_width * ITEM_BYTES[self.dtype]

    @property
    def rows_per_page(self) -> int:
        return PAGE_TOKENS // self.ratio

    def ring_rows(self, max_step_rows: int) -> int:
        """Rows that a ring needs so that a step of `max_step_rows` rows can be rolled back whole."""
        return self.window_rows + max_step_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The regions in their order on the wire."""

    regions: tuple[Region, ...]

    @property
    def target(self) -> CacheLayout:
        """Without the drafter's region, which is the last: what a request cannot go on without."""
        return CacheLayout(regions=tuple(r for r in self.regions if r.name != DRAFTER_REGION))

    @property
    def drafter(self) -> CacheLayout:
        """The drafter's region alone, or nothing."""
        return CacheLayout(regions=tuple(r for r in self.regions if r.name == DRAFTER_REGION))

    def region(self, name: str) -> Region:
        return next(region for region in self.regions if region.name == name)

    def require_equal(self, other: CacheLayout, *, ours: str, theirs: str) -> None:
        """Raise ContractMismatch that names the first field that differs and both values."""
        names, other_names = ([r.name for r in layout.regions] for layout in (self, other))
        if names != other_names:
            raise ContractMismatch(
                f"cache regions differ: {ours} has {names}, {theirs} {other_names}"
            )
        for mine, other_region in zip(self.regions, other.regions, strict=True):
            for field in Region.__dataclass_fields__:
                left, right = getattr(mine, field), getattr(other_region, field)
                if left != right:
                    raise ContractMismatch(
                        f"cache region {mine.name}: {field} is {left} at {ours} but {right} at {theirs}",
                        metadata={"region": mine.name, "field": field},
                    )


def num_pages_for(num_tokens: int) -> int:
    """Pages that cover `num_tokens` positions."""
    return -(-num_tokens // PAGE_TOKENS)
