"""Drives target and drafter without an engine: rows in, logits and taps out, on a cache with shuffled pages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.kv_cache.layout import Retention, num_pages_for
from common.kv_cache.pool import CachePool
from common.model.cache_layout import cache_layout
from common.model.dspark import DSparkModel
from common.model.plan import PlanSpec, RowRun, StepPlan, build_plan


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens of one request that a step runs."""

    slot: int
    start: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class RowsOutput:
    """What a step gave for one request's rows."""

    logits: torch.Tensor
    taps: torch.Tensor


class TargetBench:
    """A model with a cache of its own. `max_step_rows` is the widest step that is rolled back."""

    def __init__(
        self,
        model: DSparkModel,
        *,
        num_slots: int = 4,
        max_length: int = 512,
        max_step_rows: int = 8,
        seed: int = 0,
    ) -> None:
        self.model = model
        pages_each = num_pages_for(max_length)
        dtype = "bfloat16" if model.dtype == torch.bfloat16 else "float32"
        self.pool = CachePool(
            cache_layout(model.config, dtype=dtype),
            num_pages=num_slots * pages_each,
            num_slots=num_slots,
            max_step_rows=max_step_rows,
            device=torch.device("cpu"),
        )
        pages = list(range(num_slots * pages_each))
        random.Random(seed).shuffle(pages)
        self.block_tables = [pages[i * pages_each : (i + 1) * pages_each] for i in range(num_slots)]
        self._spec = plan_spec(model, self.pool)

    @torch.inference_mode()
    def run(self, *rows: Rows, rows_by_group: tuple[int, ...] | None = None) -> list[RowsOutput]:
        """One step over the rows of several requests; logits of every row, drafter context written.

        `rows_by_group` are the rows of all data parallel groups of the model's mesh.
        """
        plan = self._plan(rows, rows_by_group)
        ids = torch.tensor([token for r in rows for token in r.tokens])
        output = self.model.target.forward(ids, plan, self.pool, torch.arange(len(ids)))
        if self.model.drafter is not None:
            self.model.drafter.write_context(output.taps, plan, self.pool)
        sizes = [len(r.tokens) for r in rows]
        logits, taps = (torch.split(rows_, sizes) for rows_ in (output.logits, output.taps))
        return [RowsOutput(*pair) for pair in zip(logits, taps, strict=True)]

    def run_chunked(self, slot: int, tokens: Sequence[int], chunk: int) -> RowsOutput:
        """A whole sequence of one request, `chunk` rows a step."""
        parts = [
            self.run(Rows(slot, start, tokens[start : start + chunk]))[0]
            for start in range(0, len(tokens), chunk)
        ]
        return RowsOutput(
            torch.cat([part.logits for part in parts]), torch.cat([part.taps for part in parts])
        )

    def _plan(self, rows: Sequence[Rows], rows_by_group: tuple[int, ...] | None) -> StepPlan:
        runs = [
            RowRun(
                slot=r.slot,
                start=r.start,
                num_rows=len(r.tokens),
                block_table=self.block_tables[r.slot],
            )
            for r in rows
        ]
        return build_plan(runs, self._spec, rows_by_group)


def plan_spec(model: DSparkModel, pool: CachePool) -> PlanSpec:
    config = model.config
    return PlanSpec(
        window=config.sliding_window,
        ratios=tuple(sorted(set(config.compress_ratios) - {0})),
        num_heads=model.num_heads,
        ring_rows={
            name: buffer.rows_per_block
            for name, buffer in pool.buffers.items()
            if buffer.region.retention is Retention.RING
        },
        dtype=model.dtype,
        device=torch.device("cpu"),
    )
