from __future__ import annotations

import torch

from common.sampling.params import SamplingRows
from common.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def test_flags_say_what_the_batch_needs() -> None:
    assert SamplingRows.of([GREEDY, GREEDY], [0, 1], "cpu").all_greedy
    plain = SamplingRows.of([GREEDY, SamplingParams()], [0, 1], "cpu")
    assert plain.any_sampled and plain.any_greedy and not plain.any_filtered
    assert SamplingRows.of([SamplingParams(top_p=0.9)], [0], "cpu").any_filtered


def test_filters_of_greedy_rows_do_not_count() -> None:
    rows = SamplingRows.of([SamplingParams(temperature=0.0, top_k=3, top_p=0.5)], [0], "cpu")
    assert not rows.any_filtered
    assert not bool(rows.is_filtered.any())


def test_the_sort_is_as_narrow_as_the_widest_top_k_allows() -> None:
    top_k = [SamplingParams(top_k=5), SamplingParams(top_k=9, top_p=0.5), SamplingParams()]
    assert SamplingRows.of(top_k, range(3), "cpu").filter_width == 9
    with_top_p = [*top_k, SamplingParams(top_p=0.5)]
    assert SamplingRows.of(with_top_p, range(4), "cpu").filter_width == 0


def test_a_temperature_that_rounds_to_the_threshold_is_greedy_on_both_sides() -> None:
    """The largest double below 1e-5 is the threshold itself in single precision."""
    params = SamplingParams(temperature=0.99999999999e-5)
    rows = SamplingRows.of([params], [0], "cpu")
    assert params.is_greedy and rows.all_greedy
    assert rows.is_greedy.tolist() == [True]


def test_seeds_survive_to_the_last_bit() -> None:
    seeds = [0, 2**53 + 1, 2**63 - 1]
    rows = SamplingRows.of([SamplingParams(seed=seed) for seed in seeds], range(3), "cpu")
    assert rows.seed.tolist() == seeds


def test_rows_are_selected_repeated_and_moved() -> None:
    params = [SamplingParams(seed=seed, top_k=seed) for seed in (1, 2, 3)]
    rows = SamplingRows.of(params, torch.tensor([10, 20, 30]), "cpu")
    assert rows.select(torch.tensor([2, 0])).seed.tolist() == [3, 1]
    assert rows.select(slice(1, None)).position.tolist() == [20, 30]
    repeated = rows.repeat(2)
    assert repeated.top_k.tolist() == [1, 1, 2, 2, 3, 3]
    assert len(repeated) == 6
    assert repeated.at(torch.arange(6)).position.tolist() == [0, 1, 2, 3, 4, 5]
