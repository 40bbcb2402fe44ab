"""Index arithmetic of one step, done once and shared by all layers. Knows positions, slots and pages; no weights.

A step is a flat list of rows; each request owns a run of them at consecutive positions. Attention works on groups of
requests padded to one width: all short runs (decode rows and verify blocks) form one group, each long run (a prompt
chunk) is a group of its own, so that a chunk never pads its neighbours.

Letters: N rows of the step, B requests of a group, L rows of a request padded, K keys, M compressed rows, E entries
that close in this step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.kv_cache.layout import PAGE_TOKENS

SHORT_RUN = 16
"""Runs of at most this many rows are padded together."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRun:
    """The rows that one request contributes to a step."""

    slot: int
    start: int
    """Position of the first row; everything before it is in the cache."""
    num_rows: int
    block_table: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpec:
    """What the plan must know of model and cache."""

    window: int
    ratios: tuple[int, ...]
    """Compression ratios in use, without 0."""
    num_heads: int
    ring_rows: dict[str, int]
    """Rows of a ring by region name."""
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWrite:
    """Rows that a ring keeps of this step."""

    source: torch.Tensor | None
    """Rows of the step; None for all of them."""
    target: torch.Tensor
    """Rows of the ring, slots flattened."""

    def apply(self, ring: torch.Tensor, rows: torch.Tensor) -> None:
        ring[self.target] = (rows if self.source is None else rows[self.source]).to(ring.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedKeys:
    """Compressed rows that a group may look at, for one ratio."""

    row_index: torch.Tensor
    """Rows of the paged region, pages flattened, `[B, M]`."""
    invisible: torch.Tensor
    """`[B, L, M]`; row w is visible to position t iff w < (t + 1) // ratio."""
    dense_mask: torch.Tensor
    """Additive mask over window, own and compressed keys and the sink column, `[B, L * H, W - 1 + L + M + 1]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Requests whose attention is computed together."""

    row_index: torch.Tensor | None
    """Rows of the step `[B * L]`; None when they are all rows in order."""
    scatter_from: torch.Tensor | None
    """Positions in the padded `[B * L]` of the group's real rows; None when nothing is padded."""
    scatter_to: torch.Tensor | None
    """Rows of the step that the real rows are; None when they are all rows in order."""
    shape: tuple[int, int]
    """(B, L)."""
    past_index: torch.Tensor
    """Rows of the window ring, slots flattened, `[B * (W - 1)]`: positions start - W + 1 … start - 1."""
    window_mask: torch.Tensor
    """Additive mask over window and own keys and the sink column, `[B, L * H, W - 1 + L + 1]`."""
    compressed: dict[int, CompressedKeys]
    """By ratio; a ratio without any visible row is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """Compressed rows that close in this step, for one ratio.

    Their inputs are taken from the virtual list [past rows of the tail, rows of the step].
    """

    past_index: torch.Tensor
    """Rows of the tail ring, slots flattened, `[P]`."""
    input_index: torch.Tensor
    """`[E, coff * ratio]` into the virtual list."""
    absent: torch.Tensor | None
    """`[E, coff * ratio]`, true where the previous group does not exist; None when all exist."""
    positions: torch.Tensor
    """First position of each group, `[E]`."""
    target: torch.Tensor
    """Rows of the paged region, pages flattened, `[E]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """All index tensors of a step."""

    positions: torch.Tensor
    """`[N]`."""
    groups: tuple[AttentionGroup, ...]
    ring_writes: dict[str, RingWrite]
    """By region name."""
    ape_rows: dict[int, torch.Tensor]
    """Position modulo ratio, `[N]`, by ratio."""
    compressions: dict[int, Compression]
    """By ratio; absent when no group closes."""
    num_rows: int
    rows_by_group: tuple[int, ...]
    """Rows that each data parallel group runs in this step."""


def build_plan(
    runs: Sequence[RowRun], spec: PlanSpec, rows_by_group: tuple[int, ...] | None = None
) -> StepPlan:
    """Plan a step over `runs`, whose rows follow one another in the flat list.

    `rows_by_group` is for meshes of more than one data parallel group.
    """
    positions = np.concatenate([np.arange(run.start, run.end) for run in runs])
    offsets = np.cumsum([0, *(run.num_rows for run in runs)])
    builder = _Builder(runs, offsets, positions, spec)
    return StepPlan(
        positions=builder.tensor(positions),
        groups=builder.groups(),
        ring_writes=builder.ring_writes(),
        ape_rows={ratio: builder.tensor(positions % ratio) for ratio in spec.ratios},
        compressions=builder.compressions(),
        num_rows=int(offsets[-1]),
        rows_by_group=rows_by_group or (int(offsets[-1]),),
    )


class _Builder:
    def __init__(
        self, runs: Sequence[RowRun], offsets: Ints, positions: Ints, spec: PlanSpec
    ) -> None:
        self.runs, self.offsets, self.positions, self.spec = runs, offsets, positions, spec

    def tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(
            self.spec.device, non_blocking=True
        )

    # Ring writes -------------------------------------------------------------------------------------------------

    def ring_writes(self) -> dict[str, RingWrite]:
        by_size: dict[int, RingWrite] = {}
        for rows in self.spec.ring_rows.values():
            if rows not in by_size:
                by_size[rows] = self._ring_write(rows)
        return {name: by_size[rows] for name, rows in self.spec.ring_rows.items()}

    def _ring_write(self, ring_rows: int) -> RingWrite:
        slots = np.repeat([run.slot for run in self.runs], [run.num_rows for run in self.runs])
        target = slots * ring_rows + self.positions % ring_rows
        if all(run.num_rows <= ring_rows for run in self.runs):
            return RingWrite(source=None, target=self.tensor(target))
        # A chunk longer than the ring leaves only its newest rows; two rows must not race for one place.
        ends = np.repeat([run.end for run in self.runs], [run.num_rows for run in self.runs])
        kept = np.flatnonzero(self.positions >= ends - ring_rows)
        return RingWrite(source=self.tensor(kept), target=self.tensor(target[kept]))

    # Attention ---------------------------------------------------------------------------------------------------

    def groups(self) -> tuple[AttentionGroup, ...]:
        short = [i for i, run in enumerate(self.runs) if run.num_rows <= SHORT_RUN]
        long = [i for i, run in enumerate(self.runs) if run.num_rows > SHORT_RUN]
        members = ([short] if short else []) + [[i] for i in long]
        return tuple(self._group(ids) for ids in members)

    def _group(self, ids: list[int]) -> AttentionGroup:
        spec = self.spec
        runs = [self.runs[i] for i in ids]
        starts = np.array([run.start for run in runs])
        lengths = np.array([run.num_rows for run in runs])
        slots = np.array([run.slot for run in runs])
        width = int(lengths.max())
        columns = np.arange(width)
        real = columns < lengths[:, None]  # [B, L]
        # A padded row repeats the run's last row: its result is dropped, but it must not be NaN.
        rows = self.offsets[ids][:, None] + np.minimum(columns, lengths[:, None] - 1)
        queries = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)  # [B, L]
        past = starts[:, None] + np.arange(1 - spec.window, 0)  # [B, W - 1]
        ring = spec.ring_rows["window"]
        covers_all = len(ids) == len(self.runs)
        all_real = bool(real.all())
        key_positions = np.concatenate(
            [past, np.where(real, starts[:, None] + columns, np.iinfo(np.int64).max)], axis=1
        )
        hidden = (
            (key_positions[:, None, :] < 0)
            | (key_positions[:, None, :] > queries[:, :, None])
            | (key_positions[:, None, :] <= queries[:, :, None] - spec.window)
        )
        return AttentionGroup(
            row_index=None if covers_all and all_real else self.tensor(rows.reshape(-1)),
            scatter_from=None if all_real else self.tensor(np.flatnonzero(real)),
            scatter_to=None if covers_all else self.tensor(rows[real]),
            shape=(len(ids), width),
            past_index=self.tensor((slots[:, None] * ring + past % ring).reshape(-1)),
            window_mask=self._additive(hidden),
            compressed={
                ratio: keys
                for ratio in spec.ratios
                if (keys := self._compressed_keys(runs, ratio, queries, hidden)) is not None
            },
        )

    def _compressed_keys(
        self, runs: list[RowRun], ratio: int, queries: Ints, hidden: npt.NDArray[np.bool_]
    ) -> CompressedKeys | None:
        num_rows = max(run.end // ratio for run in runs)
        if num_rows == 0:
            return None
        rows = np.arange(num_rows)
        index = np.zeros((len(runs), num_rows), dtype=np.int64)
        for i, run in enumerate(runs):
            count = run.end // ratio
            index[i, :count] = self._paged_rows(run, rows[:count], ratio)
        invisible = rows[None, None, :] >= ((queries + 1) // ratio)[:, :, None]  # [B, L, M]
        return CompressedKeys(
            row_index=self.tensor(index),
            invisible=self.tensor(invisible),
            dense_mask=self._additive(np.concatenate([hidden, invisible], axis=2)),
        )

    def _additive(self, hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
        """0 where visible and -inf where hidden, a sink column behind, repeated over heads."""
        batch, width, _ = hidden.shape
        with_sink = np.concatenate([hidden, np.zeros((batch, width, 1), dtype=np.bool_)], axis=2)
        mask = np.where(with_sink, np.float32(-np.inf), np.float32(0))
        mask = np.repeat(mask, self.spec.num_heads, axis=1)
        return self.tensor(mask).to(self.spec.dtype)

    # Compression -------------------------------------------------------------------------------------------------

    def compressions(self) -> dict[int, Compression]:
        plans = {ratio: self._compression(ratio) for ratio in self.spec.ratios}
        return {ratio: plan for ratio, plan in plans.items() if plan is not None}

    def _compression(self, ratio: int) -> Compression | None:
        overlap = ratio if ratio == 4 else 0
        ring = self.spec.ring_rows["csa_tail" if ratio == 4 else "hca_tail"]
        past: list[Ints] = []
        inputs: list[Ints] = []
        groups: list[Ints] = []
        targets: list[Ints] = []
        num_past = 0
        for run, offset in zip(self.runs, self.offsets, strict=False):
            closing = np.arange(run.start // ratio, run.end // ratio)
            if not closing.size:
                continue
            first = max(0, int(closing[0]) * ratio - overlap)
            needed = closing[:, None] * ratio + np.arange(
                -overlap, ratio
            )  # [e, coff * ratio] positions
            past.append(run.slot * ring + np.arange(first, run.start) % ring)
            # Own rows are marked by negative numbers until the number of past rows is known.
            inputs.append(
                np.where(
                    needed < run.start,
                    num_past + needed - first,
                    -1 - (offset + needed - run.start),
                )
            )
            groups.append(closing * ratio)
            targets.append(self._paged_rows(run, closing, ratio))
            num_past += max(0, run.start - first)
        if not groups:
            return None
        positions = np.concatenate(groups)
        index = np.concatenate(inputs)
        index = np.where(index < 0, num_past - 1 - index, index)
        absent = np.broadcast_to(
            (positions == 0)[:, None] & (np.arange(overlap + ratio) < overlap), index.shape
        )
        return Compression(
            past_index=self.tensor(np.concatenate(past)),
            input_index=self.tensor(np.where(absent, 0, index)),
            absent=self.tensor(absent) if absent.any() else None,
            positions=self.tensor(positions),
            target=self.tensor(np.concatenate(targets)),
        )

    @staticmethod
    def _paged_rows(run: RowRun, rows: Ints, ratio: int) -> Ints:
        per_page = PAGE_TOKENS // ratio
        pages = np.asarray(run.block_table, dtype=np.int64)
        return pages[rows // per_page] * per_page + rows % per_page
