"""The index arithmetic of a step against a reference that looks at one row at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model.plan import SHORT_RUN, PlanSpec, RowRun, StepPlan, build_plan

WINDOW, HEADS, STEP_ROWS = 16, 3, 8
NUM_SLOTS, PAGES_EACH = 5, 4
RINGS = {
    "window": WINDOW + STEP_ROWS,
    "csa_tail": 8 + STEP_ROWS,
    "index_tail": 8 + STEP_ROWS,
    "hca_tail": 128 + STEP_ROWS,
    "drafter": WINDOW + STEP_ROWS,
}
SPEC = PlanSpec(
    window=WINDOW,
    ratios=(4, 128),
    num_heads=HEADS,
    ring_rows=RINGS,
    dtype=torch.float32,
    device=torch.device("cpu"),
)
BORDERS = (0, 1, 3, 4, 15, 16, 17, 23, 24, 126, 127, 128, 129, 255, 256, 257)
SIZES = (1, 2, 3, 4, 5, 8, 16, 17, 24, 25, 64, 127, 128, 129, 140)

Place = tuple[str, int]
"""Where a row comes from: ("ring", flattened ring row), ("page", flattened page row) or ("step", row of the step)."""


def make_runs(sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[RowRun]:
    """Runs of (start, rows) in distinct slots over shuffled pages."""
    rng = random.Random(seed)
    slots = rng.sample(range(NUM_SLOTS), len(sizes))
    pages = rng.sample(range(NUM_SLOTS * PAGES_EACH), NUM_SLOTS * PAGES_EACH)
    return [
        RowRun(
            slot=slot,
            start=start,
            num_rows=rows,
            block_table=pages[slot * PAGES_EACH : (slot + 1) * PAGES_EACH],
        )
        for slot, (start, rows) in zip(slots, sizes, strict=True)
    ]


def step_rows(runs: Sequence[RowRun]) -> list[tuple[RowRun, int, int]]:
    """(run, position, row of the step) of every row."""
    placed = [(run, position) for run in runs for position in range(run.start, run.end)]
    return [(run, position, row) for row, (run, position) in enumerate(placed)]


def place(run: RowRun, first_row: int, position: int, ring: int) -> Place:
    """Where a position's row is while the step runs: among its own rows or in the ring."""
    if position >= run.start:
        return "step", first_row + position - run.start
    return "ring", run.slot * ring + position % ring


def page_row(run: RowRun, entry: int, ratio: int) -> int:
    return run.block_table[entry * ratio // 128] * (128 // ratio) + entry % (128 // ratio)


def expected_keys(
    run: RowRun, first_row: int, position: int, ratio: int | None
) -> tuple[set[Place], set[Place]]:
    """Window keys and compressed keys that one row looks at."""
    near = {
        place(run, first_row, p, RINGS["window"])
        for p in range(max(0, position - WINDOW + 1), position + 1)
    }
    far = set()
    if ratio is not None:
        far = {("page", page_row(run, w, ratio)) for w in range((position + 1) // ratio)}
    return near, far


def check_attention(plan: StepPlan, runs: Sequence[RowRun]) -> None:
    by_row = {row: (run, position) for run, position, row in step_rows(runs)}
    seen: list[int] = []
    for group in plan.groups:
        batch, width = group.shape
        num_rows = batch * width
        rows = list(range(plan.num_rows)) if group.row_index is None else group.row_index.tolist()
        assert len(rows) == num_rows
        real = list(range(num_rows)) if group.scatter_from is None else group.scatter_from.tolist()
        to = list(range(plan.num_rows)) if group.scatter_to is None else group.scatter_to.tolist()
        assert [rows[i] for i in real] == to, "a result is scattered to another row than was read"
        seen += to
        past = group.past_index.view(batch, WINDOW - 1)
        masks = {None: group.window_mask} | {r: c.dense_mask for r, c in group.compressed.items()}
        for ratio, mask in masks.items():
            heads = mask.view(batch, width, HEADS, -1)
            assert (heads == heads[:, :, :1]).all(), "heads see different keys"
            assert (heads[..., -1] == 0).all(), "the sink is hidden from some row"
            for i in real:
                b, column = divmod(i, width)
                run, position = by_row[rows[i]]
                first_row = rows[i] - (position - run.start)
                places: list[Place] = [("ring", r) for r in past[b].tolist()]
                places += [("step", rows[b * width + c]) for c in range(width)]
                if ratio is not None:
                    compressed = group.compressed[ratio]
                    places += [("page", r) for r in compressed.row_index[b].tolist()]
                    visible = ~compressed.invisible[b, column]
                    assert (heads[b, column, 0, WINDOW - 1 + width : -1] == 0).equal(visible)
                open_columns = np.flatnonzero(heads[b, column, 0, :-1].numpy() == 0)
                found = [places[c] for c in open_columns]
                near, far = expected_keys(run, first_row, position, ratio)
                assert len(found) == len(set(found)), "a key is counted twice"
                assert set(found) == near | far, f"{ratio=} {position=}"
        for ratio in SPEC.ratios:
            nothing = all(run.end < ratio for run in (by_row[r][0] for r in to))
            assert (ratio in group.compressed) != nothing
    assert sorted(seen) == list(range(plan.num_rows))


def check_ring_writes(plan: StepPlan, runs: Sequence[RowRun]) -> None:
    for name, ring in RINGS.items():
        expected = {}
        for run, position, row in step_rows(runs):
            expected[run.slot * ring + position % ring] = row
        write = plan.ring_writes[name]
        source = range(plan.num_rows) if write.source is None else write.source.tolist()
        target = write.target.tolist()
        assert len(set(target)) == len(target), "two rows race for one place"
        assert dict(zip(target, source, strict=True)) == expected


def check_compressions(plan: StepPlan, runs: Sequence[RowRun]) -> None:
    for ratio, tail in ((4, "csa_tail"), (128, "hca_tail")):
        overlap = 4 if ratio == 4 else 0
        expected = []
        first_row = 0
        for run in runs:
            for w in range(run.start // ratio, run.end // ratio):
                inputs = [
                    None if p < 0 else place(run, first_row, p, RINGS[tail])
                    for p in range(w * ratio - overlap, (w + 1) * ratio)
                ]
                expected.append((w * ratio, page_row(run, w, ratio), inputs))
            first_row += run.num_rows
        compression = plan.compressions.get(ratio)
        if compression is None:
            assert not expected
            continue
        virtual: list[Place] = [("ring", r) for r in compression.past_index.tolist()]
        virtual += [("step", r) for r in range(plan.num_rows)]
        index = compression.input_index
        absent = torch.zeros_like(index) if compression.absent is None else compression.absent
        found = [
            (
                position,
                target,
                [None if a else virtual[i] for i, a in zip(i_row, a_row, strict=True)],
            )
            for position, target, i_row, a_row in zip(
                compression.positions.tolist(),
                compression.target.tolist(),
                index.tolist(),
                absent.tolist(),
                strict=True,
            )
        ]
        assert found == expected
        assert index.min() >= 0


def check(sizes: Sequence[tuple[int, int]], seed: int = 0) -> StepPlan:
    runs = make_runs(sizes, seed)
    plan = build_plan(runs, SPEC)
    assert plan.num_rows == sum(rows for _, rows in sizes)
    assert plan.positions.tolist() == [position for _, position, _ in step_rows(runs)]
    for ratio in SPEC.ratios:
        assert plan.ape_rows[ratio].tolist() == [p % ratio for p in plan.positions.tolist()]
    check_attention(plan, runs)
    check_ring_writes(plan, runs)
    check_compressions(plan, runs)
    return plan


@pytest.mark.parametrize("start", BORDERS)
@pytest.mark.parametrize("rows", [1, 4, 8, 130])
def test_one_request_at_every_border(start: int, rows: int) -> None:
    check([(start, rows)])


def test_short_runs_share_a_group_and_long_ones_stand_alone() -> None:
    plan = check([(3, SHORT_RUN), (128, 1), (0, SHORT_RUN + 1), (255, 2), (100, 200)])
    assert [group.shape for group in plan.groups] == [
        (3, SHORT_RUN),
        (1, SHORT_RUN + 1),
        (1, 200),
    ]


def test_an_unpadded_single_group_needs_no_gather() -> None:
    group = check([(5, 4), (128, 4)]).groups[0]
    assert group.row_index is None and group.scatter_from is None and group.scatter_to is None


@settings(max_examples=40)
@given(
    sizes=st.lists(
        st.tuples(st.one_of(st.sampled_from(BORDERS), st.integers(0, 350)), st.sampled_from(SIZES)),
        min_size=1,
        max_size=NUM_SLOTS,
    ),
    seed=st.integers(0, 1000),
)
def test_any_mix_of_runs(sizes: list[tuple[int, int]], seed: int) -> None:
    check(sizes, seed)
