from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from common.spec_decode.budget import rank_by_survival, row_budget, widths_with_early_break
from common.spec_decode.cost_table import CostTable

CONFIDENCES = st.lists(
    st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.9, 0.97, 1.0]), max_size=4), max_size=4
)
COSTS = st.builds(
    lambda start, steps: CostTable.of(enumerate(accumulate(steps, initial=start), start=1)),
    st.floats(0.5, 2.0),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20),
)


def _survival(confidences: list[list[float]]) -> list[list[float]]:
    return [list(accumulate(values, mul)) for values in confidences]


def _per_second(speeds: list[float]) -> Callable[[int], float]:
    return lambda num_rows: speeds[num_rows - 1]


def _throughput(survival: list[list[float]], widths: list[int], table: CostTable) -> float:
    gains = sum(sum(values[:width]) for values, width in zip(survival, widths, strict=True))
    return (len(survival) + gains) / table.step_s(len(survival) + sum(widths))


def test_the_papers_example_admits_nothing_whatever_comes_later() -> None:
    """DSpark, appendix A: a search that went on would verify 2 drafts if the second looks good and 0 if not."""
    speed = _per_second([1.0, 0.5, 0.45])
    for second_confidence in (0.9, 0.0):
        assert widths_with_early_break([[0.8, 0.8 * second_confidence]], speed) == [0]


def test_drafts_are_admitted_while_they_pay() -> None:
    speed = _per_second([1.0, 0.9, 0.8, 0.7, 0.1, 0.1])
    assert widths_with_early_break([[0.9, 0.5], [0.8, 0.1]], speed) == [1, 1]


def test_an_empty_step_has_no_widths() -> None:
    assert widths_with_early_break([], lambda rows: 1.0) == []
    assert rank_by_survival([], 3) == []


@given(CONFIDENCES.filter(bool), COSTS)
@settings(deadline=None)
def test_the_early_break_sees_no_draft_after_the_one_it_stops_at(
    confidences: list[list[float]], table: CostTable
) -> None:
    """Changing confidences behind a request's width changes no width."""
    survival = _survival(confidences)
    widths = widths_with_early_break(survival, lambda rows: 1.0 / table.step_s(rows))
    for request, width in enumerate(widths):
        cut = [values[:] for values in survival]
        cut[request] = [*cut[request][: width + 1], *(0.0 for _ in cut[request][width + 1 :])]
        assert widths_with_early_break(cut, lambda rows: 1.0 / table.step_s(rows)) == widths


@given(CONFIDENCES.filter(bool), COSTS)
@settings(deadline=None)
def test_the_budget_is_the_best_that_any_widths_reach(
    confidences: list[list[float]], table: CostTable
) -> None:
    survival = _survival(confidences)
    budget = row_budget(survival, table, len(survival))
    widths = rank_by_survival(survival, budget)
    choices = product(*(range(len(values) + 1) for values in survival))
    best = max(_throughput(survival, list(choice), table) for choice in choices)
    assert _throughput(survival, widths, table) == pytest.approx(best)


@given(CONFIDENCES, st.integers(0, 20))
@settings(deadline=None)
def test_a_rank_spends_its_budget_on_the_likeliest_drafts(
    confidences: list[list[float]], budget: int
) -> None:
    survival = _survival(confidences)
    widths = rank_by_survival(survival, budget)
    assert sum(widths) == min(budget, sum(map(len, survival)))
    admitted = [s for v, w in zip(survival, widths, strict=True) for s in v[:w]]
    left = [s for v, w in zip(survival, widths, strict=True) for s in v[w:]]
    assert min(admitted, default=1.0) >= max(left, default=0.0)


def test_equal_survivals_go_to_the_earlier_draft_then_to_the_earlier_request() -> None:
    equal = [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    widths = [rank_by_survival(equal, budget) for budget in range(7)]
    assert widths[:4] == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert widths[4:] == [[2, 1, 1], [2, 2, 1], [2, 2, 2]]


def test_requests_without_confidences_have_a_row_and_no_budget() -> None:
    table = CostTable.of([(1, 1.0), (64, 1.0)])
    assert row_budget([], table, 3) == 0
    assert row_budget([[], [0.5]], table, 2) == 1


def test_a_request_never_seen_before_counts_as_certain() -> None:
    table = CostTable.of([(1, 1.0), (8, 1.7)])
    assert row_budget([[1.0] * 5], table, 1) == 5
    assert row_budget([[0.05] * 5], table, 1) == 0


def test_free_rows_are_all_used_and_dear_rows_are_not() -> None:
    survival = [[0.5, 0.2], [0.4, 0.1]]
    assert row_budget(survival, CostTable.of([(1, 1.0), (100, 1.0)]), 2) == 4
    assert row_budget(survival, CostTable.of([(1, 1.0), (100, 100.0)]), 2) == 0


def test_a_cost_table_interpolates_and_goes_on_beyond_its_ends() -> None:
    table = CostTable.of([(2, 1.0), (4, 2.0), (10, 5.0)])
    costs = [table.step_s(rows) for rows in (1, 2, 3, 4, 7, 10, 12)]
    assert costs == pytest.approx([1.0, 1.0, 1.5, 2.0, 3.5, 5.0, 6.0])


def test_a_measurement_faster_than_that_of_fewer_rows_is_noise() -> None:
    table = CostTable.of([(8, 0.9), (1, 1.0), (16, 2.0)])
    assert table.rows == (1, 8, 16)
    assert table.seconds == (1.0, 1.0, 2.0)


def test_a_table_of_one_measurement_is_flat() -> None:
    table = CostTable.of([(4, 0.5)])
    assert table.step_s(1) == table.step_s(400) == 0.5


@pytest.mark.parametrize("measurements", [[], [(0, 1.0)], [(1, 0.0)], [(1, -1.0), (2, 1.0)]])
def test_a_senseless_table_is_refused(measurements: list[tuple[int, float]]) -> None:
    with pytest.raises(ConfigError):
        CostTable.of(measurements)
