"""A vocabulary that is spread over ranks gives what the whole one gives: the largest, the first of equals, whole rows."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.parallel.collectives import Axis
from tests.support.thread_ranks import run_axis
from tests.support.vocabularies import vocabulary_of

FLOAT_MIN = torch.finfo(torch.float32).min
SPREADS = [(10, 2), (10, 4), (9, 4), (5, 4), (1, 3), (64, 4)]
"""Sizes and ranks: even, uneven, a last part that is short or empty, nothing but empty parts behind the first."""


def spread_argmax(logits: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    def body(axis: Axis) -> torch.Tensor:
        ours = vocabulary_of(logits.shape[-1], axis)
        return ours.argmax(logits[..., ours.part])

    return run_axis(ranks, body)


def require_equal_argmax(logits: torch.Tensor, ranks: int) -> None:
    for found in spread_argmax(logits, ranks):
        assert found.dtype == torch.int64
        assert torch.equal(found, logits.argmax(-1)), (found, logits)


@pytest.mark.parametrize(("size", "ranks"), SPREADS)
def test_the_largest_is_found_wherever_it_is(size: int, ranks: int) -> None:
    """Row i has its largest logit at id i."""
    logits = (
        torch.eye(size) + torch.rand(size, size, generator=torch.Generator().manual_seed(1)) / 2
    )
    require_equal_argmax(logits, ranks)


@pytest.mark.parametrize(("size", "ranks"), SPREADS)
def test_the_lowest_id_of_equals_wins_across_ranks(size: int, ranks: int) -> None:
    """Every pair of ids as the two largest of a row, then all ids equal."""
    rows = [torch.zeros(size)]
    for i in range(size):
        for j in range(i):
            rows.append(torch.zeros(size).index_fill_(0, torch.tensor([i, j]), 2.5))
    logits = torch.stack(rows)
    require_equal_argmax(logits, ranks)
    assert spread_argmax(logits, ranks)[0][0] == 0


@pytest.mark.parametrize(("size", "ranks"), SPREADS)
@pytest.mark.parametrize("filler", [-math.inf, FLOAT_MIN, -1e30], ids=["-inf", "lowest", "low"])
def test_what_fills_up_a_part_never_wins(size: int, ranks: int, filler: float) -> None:
    """Rows with nothing to win but the very lowest numbers; one id is a little above in the second."""
    logits = torch.full((2, size), filler)
    logits[1, -1] = -1e29
    require_equal_argmax(logits, ranks)
    for found in spread_argmax(logits, ranks):
        assert int(found.min()) >= 0 and int(found.max()) < size


@settings(max_examples=60)
@given(
    values=st.lists(
        st.sampled_from([-math.inf, FLOAT_MIN, -1.0, 0.0, -0.0, 1.0, 1e-45]),
        min_size=1,
        max_size=13,
    ),
    ranks=st.integers(2, 5),
)
def test_any_row_of_few_different_values_has_the_same_winner(
    values: list[float], ranks: int
) -> None:
    require_equal_argmax(torch.tensor([values, values[::-1]]), ranks)


@pytest.mark.parametrize(("size", "ranks"), SPREADS)
def test_whole_rows_are_the_rows(size: int, ranks: int) -> None:
    logits = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(2))

    def body(axis: Axis) -> torch.Tensor:
        ours = vocabulary_of(size, axis)
        return ours.whole(logits[..., ours.part])

    assert all(torch.equal(whole, logits) for whole in run_axis(ranks, body))


@settings(max_examples=60)
@given(
    values=st.lists(
        st.sampled_from([-math.inf, FLOAT_MIN, -1.0, 0.0, -0.0, 1.0]), min_size=1, max_size=40
    ),
    ranks=st.integers(2, 5),
    counts=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3)),
)
def test_the_largest_few_are_those_of_the_whole_row_and_the_lowest_ids_of_equals(
    values: list[float], ranks: int, counts: tuple[int, ...]
) -> None:
    """Few different values, so that equals lie on both sides of almost every border."""
    row = torch.tensor(values)
    logits = torch.stack((row, row.flip(0), row.roll(1)))

    def body(axis: Axis) -> torch.Tensor:
        ours = vocabulary_of(len(values), axis)
        return ours.top(logits[:, ours.part], counts)

    order = logits.sort(dim=-1, descending=True, stable=True).indices
    for found in run_axis(ranks, body):
        assert found.shape == logits.shape
        for i, count in enumerate(counts):
            asked = order[i, : count or None]
            assert torch.equal(found[i, asked], logits[i, asked]), f"{i=}"
            assert bool(((found[i] == logits[i]) | (found[i] == -math.inf)).all()), f"{i=}"


def test_the_largest_cost_two_numbers_each_and_whole_rows_cost_all_of_them() -> None:
    """Flash's vocabulary on four ranks, one row of a batch of eight."""
    size, ranks, rows = 129280, 4, 8
    half_a_part = size // ranks // 2

    def body(axis: Axis) -> list[int]:
        ours = vocabulary_of(size, axis)
        part = torch.zeros(rows, len(range(size)[ours.part]))
        sent = [0]
        ours.argmax(part)
        sent.append(axis.sent_bytes["gather"])
        ours.whole(part)
        sent.append(axis.sent_bytes["gather"])
        ours.top(part, range(1, rows + 1))
        sent.append(axis.sent_bytes["gather"])
        ours.top(part[:3], [half_a_part - 1, half_a_part, 0])
        sent.append(axis.sent_bytes["gather"])
        return [(after - before) // (ranks - 1) for before, after in pairwise(sent)]

    for largest, whole, few, many in run_axis(ranks, body):
        assert largest == rows * 2 * 8
        assert whole == rows * size // ranks * 4
        assert few == sum(range(1, rows + 1)) * 8
        assert many == (half_a_part - 1) * 8 + 2 * size // ranks * 4


def test_a_whole_vocabulary_is_left_as_it_is() -> None:
    ours = vocabulary_of(7, Axis("tp"))
    logits = torch.randn(2, 7)
    assert ours.is_whole and ours.whole(logits) is logits
    assert ours.top(logits, [1, 2]) is logits
    assert torch.equal(ours.argmax(logits), logits.argmax(-1))
