"""How many pages a rank's memory has room for, once everything that comes before them is counted. Arithmetic only.

The order is that of need: weights and tables, the drafter's rows, window rows and open groups of every slot, then pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.errors import ConfigError
from common.kv_cache.layout import (
    DRAFTER_REGION,
    PAGE_TOKENS,
    CacheLayout,
    Retention,
    num_pages_for,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Memory of a device that one rank may hold for as long as it lives."""

    device: str
    total_bytes: int
    fraction: float
    """Of the total; the rest is for what passes in a step, and the driver."""
    others_bytes: int
    """In use before the rank began."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(
                f"memory_fraction is {self.fraction}; give a value above 0 and up to 1"
            )

    @property
    def usable_bytes(self) -> int:
        return max(0, int(self.total_bytes * self.fraction) - self.others_bytes)

    def __str__(self) -> str:
        others = f" less {_gib(self.others_bytes)} in use before" if self.others_bytes else ""
        return (
            f"{_gib(self.usable_bytes)} may be used on {self.device} (memory_fraction {self.fraction:g} "
            f"of {_gib(self.total_bytes)}{others})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNeed:
    """What one rank's cache is to hold."""

    page_bytes: int
    ring_bytes: int
    """Window rows and open groups of one slot."""
    drafter_bytes: int
    """Drafter rows of one slot."""
    num_slots: int
    """Of one data parallel group."""
    max_context_length: int
    num_groups: int = 1
    """Data parallel groups of the mesh."""
    num_held: int = 1
    """Groups whose cache is in this memory; bytes are those of all of them, a page or slot of each counted as one."""

    @classmethod
    def of(
        cls,
        layout: CacheLayout,
        *,
        num_slots: int,
        max_step_rows: int,
        max_context_length: int,
        num_groups: int = 1,
    ) -> CacheNeed:
        """Of one group; slots are its own."""
        page = ring = drafter = 0
        for region in layout.regions:
            is_paged = region.retention is Retention.PAGED
            rows = region.rows_per_page if is_paged else region.ring_rows(max_step_rows)
            size = len(region.layer_ids) * rows * region.row_bytes
            if is_paged:
                page += size
            elif region.name == DRAFTER_REGION:
                drafter += size
            else:
                ring += size
        return cls(
            page_bytes=page,
            ring_bytes=ring,
            drafter_bytes=drafter,
            num_slots=num_slots,
            max_context_length=max_context_length,
            num_groups=num_groups,
        )

    def of_all_groups(self) -> CacheNeed:
        """From one group's to that of the whole mesh."""
        return replace(
            self,
            page_bytes=self.page_bytes * self.num_groups,
            ring_bytes=self.ring_bytes * self.num_groups,
            drafter_bytes=self.drafter_bytes * self.num_groups,
            num_held=self.num_groups,
        )

    @property
    def slot_bytes(self) -> int:
        return self.ring_bytes + self.drafter_bytes

    @property
    def context_bytes(self) -> int:
        """Pages of a request of the longest context."""
        return num_pages_for(self.max_context_length) * self.page_bytes


def num_pages_within(
    budget: Budget,
    need: CacheNeed,
    *,
    weight_bytes: int,
    table_bytes: int,
    num_pages: int | None = None,
) -> int:
    """Pages that fit beside weights, tables and all slots; enough for a request of the longest context.

    `num_pages` is a number that somebody has asked for: it must fit, and need not be enough for that. Raises ConfigError
    with the numbers and the largest values that fit.
    """
    held = weight_bytes + table_bytes
    if held > budget.usable_bytes:
        raise ConfigError(_weights_too_large(budget, weight_bytes, table_bytes))
    left = budget.usable_bytes - held
    for_pages = left - need.num_slots * need.slot_bytes
    fits = max(0, for_pages) // max(1, need.page_bytes)
    if num_pages is not None and 0 < fits < num_pages:
        raise ConfigError(
            f"num_pages is {num_pages} for each data parallel group; {fits} fit. {_sums(budget, need, held)}"
        )
    if fits < (num_pages or num_pages_for(need.max_context_length)):
        raise ConfigError(_cache_too_large(budget, need, held, left))
    return fits


def _weights_too_large(budget: Budget, weight_bytes: int, table_bytes: int) -> str:
    wanted = (weight_bytes + table_bytes + budget.others_bytes) / budget.total_bytes
    advice = f", or give a memory_fraction above {wanted:.2f}" if wanted < 0.99 else ""
    return (
        f"the weights of this rank take {_gib(weight_bytes)} and tables {_gib(table_bytes)}, but only {budget}; "
        f"spread them over more ranks (tp, ep){advice}"
    )


def _cache_too_large(budget: Budget, need: CacheNeed, held: int, left: int) -> str:
    slots = need.num_slots
    fits = []
    most_slots = (left - need.context_bytes) // max(1, need.slot_bytes)
    if most_slots > 0:
        fits.append(f"num_slots of at most {most_slots * need.num_groups}")
    longest = max(0, left - slots * need.slot_bytes) // max(1, need.page_bytes) * PAGE_TOKENS
    if longest:
        fits.append(f"a max_context_length of at most {longest}")
    if not fits:
        one_slot = max(0, left - need.slot_bytes) // max(1, need.page_bytes) * PAGE_TOKENS
        fits.append(
            f"num_slots {need.num_groups} with a max_context_length of at most {one_slot}"
            if one_slot
            else "no request at all; more ranks share the weights"
        )
    return (
        f"the cache does not fit. {_sums(budget, need, held)}, and a request of max_context_length "
        f"{need.max_context_length} {_gib(need.context_bytes)} of pages. What fits is {' or '.join(fits)}"
    )


def _sums(budget: Budget, need: CacheNeed, held: int) -> str:
    slots = need.num_slots
    groups = f" in each of {need.num_held} groups" if need.num_held > 1 else ""
    return (
        f"{budget}: weights and tables take {_gib(held)}, the drafter's rows of {slots} slots{groups} "
        f"{_gib(slots * need.drafter_bytes)}, their window rows and open groups {_gib(slots * need.ring_bytes)}"
    )


def _gib(num_bytes: int) -> str:
    return (
        f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 1 << 28 else f"{num_bytes / 2**20:.2f} MiB"
    )
