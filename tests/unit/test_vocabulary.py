"""A vocabulary that is spread over ranks gives what the whole one gives: the largest, the first of equals, whole rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.parallel.collectives import Axis
from common.parallel.mesh import MeshShape
from common.parallel.shard import Shard
from common.parallel.vocabulary import Vocabulary
from tests.support.thread_ranks import run_axis

FLOAT_MIN = torch.finfo(torch.float32).min
SPREADS = [(10, 2), (10, 4), (9, 4), (5, 4), (1, 3), (64, 4)]
"""Sizes and ranks: even, uneven, a last part that is short or empty, nothing but empty parts behind the first."""


def vocabulary(size: int, axis: Axis) -> Vocabulary:
    shard = Shard(mesh=MeshShape(tp=axis.size), rank=axis.index)
    return Vocabulary(size=size, part=shard.vocabulary_part(size), axis=axis)


def spread_argmax(logits: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    def body(axis: Axis) -> torch.Tensor:
        ours = vocabulary(logits.shape[-1], axis)
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
        ours = vocabulary(size, axis)
        return ours.whole(logits[..., ours.part])

    assert all(torch.equal(whole, logits) for whole in run_axis(ranks, body))


def test_the_largest_costs_two_numbers_a_row_and_whole_rows_cost_all_of_them() -> None:
    """Flash's vocabulary on four ranks, one row of a batch of eight."""
    size, ranks, rows = 129280, 4, 8

    def body(axis: Axis) -> tuple[int, int]:
        ours = vocabulary(size, axis)
        part = torch.zeros(rows, len(range(size)[ours.part]))
        ours.argmax(part)
        largest = axis.sent_bytes["gather"]
        ours.whole(part)
        return largest, axis.sent_bytes["gather"] - largest

    for largest, whole in run_axis(ranks, body):
        assert largest == rows * 2 * 8 * (ranks - 1)
        assert whole == rows * size // ranks * 4 * (ranks - 1)


def test_a_whole_vocabulary_is_left_as_it_is() -> None:
    ours = vocabulary(7, Axis("tp"))
    logits = torch.randn(2, 7)
    assert ours.is_whole and ours.whole(logits) is logits
    assert torch.equal(ours.argmax(logits), logits.argmax(-1))
