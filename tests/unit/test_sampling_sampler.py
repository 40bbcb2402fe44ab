from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.sampling.params import SamplingRows
from common.sampling.sampler import filtered_logits, probabilities, sample
from common.types import SamplingParams
from tests.unit.chi_square import FALSE_ALARM, p_value


def _rows(*params: SamplingParams) -> SamplingRows:
    return SamplingRows.of(params, range(len(params)), "cpu")


def _kept(logits: list[float], params: SamplingParams) -> list[int]:
    filtered = filtered_logits(torch.tensor([logits]), _rows(params))[0]
    return filtered.isfinite().nonzero().flatten().tolist()


def _kept_by_definition(logits: list[float], params: SamplingParams) -> list[int]:
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp((logits[i] - max(logits)) / params.temperature) for i in order]
    if params.top_p < 1.0:
        mass = 0.0
        for count, weight in enumerate(weights):
            if mass >= params.top_p * sum(weights):
                return sorted(order[:count])
            mass += weight
    return sorted(order)


def _is_near_a_boundary(logits: list[float], params: SamplingParams) -> bool:
    """Whether single precision may place top-p on either side of a token."""
    best = sorted(logits, reverse=True)[: params.top_k or None]
    weights = torch.tensor(best, dtype=torch.float64).div(params.temperature).softmax(0)
    return bool(((weights.cumsum(0) - params.top_p).abs() < 1e-5).any())


SAMPLED = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 12),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    seed=st.integers(0, 2**63 - 1),
)
GREEDY = st.just(SamplingParams(temperature=0.0, top_k=2, top_p=0.5))
# Few distinct values, so that ties are common.
LOGITS = st.lists(st.integers(-4, 4).map(lambda i: i / 2), min_size=10, max_size=10)


@given(LOGITS, SAMPLED)
@settings(max_examples=150, deadline=None)
def test_filters_keep_what_their_definition_keeps(
    logits: list[float], params: SamplingParams
) -> None:
    if not _is_near_a_boundary(logits, params):
        assert _kept(logits, params) == _kept_by_definition(logits, params)


@given(st.lists(st.tuples(LOGITS, st.one_of(SAMPLED, GREEDY)), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_row_does_not_depend_on_its_batch(
    batch: list[tuple[list[float], SamplingParams]],
) -> None:
    logits = torch.tensor([row for row, _ in batch])
    rows = _rows(*(params for _, params in batch))
    filtered, ids = filtered_logits(logits, rows), sample(logits, rows)
    probs = probabilities(logits, rows)
    for i, (_, params) in enumerate(batch):
        alone = SamplingRows.of([params], [i], "cpu")
        assert torch.equal(filtered_logits(logits[i : i + 1], alone)[0], filtered[i])
        assert torch.equal(sample(logits[i : i + 1], alone)[0], ids[i])
        assert torch.equal(probabilities(logits[i : i + 1], alone)[0], probs[i])


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    assert _kept(logits, SamplingParams(top_p=0.4)) == [0]
    assert _kept(logits, SamplingParams(top_p=0.6)) == [0, 1]
    assert _kept(logits, SamplingParams(top_p=0.9)) == [0, 1, 2]


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert _kept(logits, SamplingParams(top_p=0.55)) == [0, 1]
    assert _kept(logits, SamplingParams(top_k=2, top_p=0.55)) == [0]


def test_of_equal_logits_the_lower_ids_are_kept() -> None:
    assert _kept([1.0, 2.0, 1.0, 1.0], SamplingParams(top_k=2)) == [0, 1]
    assert _kept([0.0, 0.0, 0.0, 0.0], SamplingParams(top_p=0.6)) == [0, 1, 2]


def test_a_top_p_of_one_keeps_the_last_token_of_a_long_flat_tail() -> None:
    """Summed in single precision, the mass before the tail's end is 1 already."""
    logits = torch.cat([torch.tensor([20.0]), torch.zeros(5000)])[None]
    rows = _rows(SamplingParams(top_k=5001, top_p=1.0))
    assert bool(filtered_logits(logits, rows).isfinite().all())


def test_a_lone_token_is_drawn_whatever_the_noise() -> None:
    num_seeds = 3000
    rows = _rows(*(SamplingParams(top_k=1, seed=seed) for seed in range(num_seeds)))
    logits = torch.tensor([0.0, 1.0, 5.0, 2.0]).expand(num_seeds, 4)
    assert set(sample(logits, rows).tolist()) == {2}


def test_greedy_rows_take_the_first_maximum_also_among_sampled_rows() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]]).repeat(3, 1)
    greedy = SamplingParams(temperature=0.0)
    assert sample(logits, _rows(greedy, greedy, greedy)).tolist() == [1, 1, 1]
    mixed = _rows(greedy, SamplingParams(seed=1), greedy)
    assert sample(logits, mixed)[[0, 2]].tolist() == [1, 1]
    assert probabilities(logits, mixed)[0].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert float(probabilities(logits, mixed)[1].sum()) == pytest.approx(1.0)


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=0.5, top_k=3, top_p=0.7),
    ):
        rows = _rows(params, params, SamplingParams(temperature=0.0), params)
        sample(logits, rows)
        probabilities(logits, rows)
        assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5, top_k=7),
        SamplingParams(temperature=1.2, top_p=0.8),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.9),
    ],
)
def test_draws_follow_the_softmax_over_seeds_and_over_positions(params: SamplingParams) -> None:
    """Two chi-square comparisons of 20,000 draws, each with a false alarm in 1e-6."""
    num_draws, vocab_size = 20_000, 24
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 1.5
    one = SamplingRows.of([params], [0], "cpu")
    expected = probabilities(logits[None], one)[0]
    many = one.repeat(num_draws)
    index = torch.arange(num_draws)
    for rows in (many.at(index), _with_seeds(params, num_draws)):
        ids = sample(logits.expand(num_draws, vocab_size), rows)
        assert p_value(ids.bincount(minlength=vocab_size), expected) > FALSE_ALARM


def _with_seeds(params: SamplingParams, count: int) -> SamplingRows:
    every = [
        SamplingParams(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, seed=seed
        )
        for seed in range(count)
    ]
    return SamplingRows.of(every, [11] * count, "cpu")


def test_the_draw_is_a_function_of_seed_and_position() -> None:
    logits = torch.zeros(1, 4096)

    def draw(seed: int, position: int) -> Tensor:
        return sample(logits, SamplingRows.of([SamplingParams(seed=seed)], [position], "cpu"))

    assert torch.equal(draw(5, 9), draw(5, 9))
    assert len({int(draw(seed, position)) for seed in range(5) for position in range(5)}) == 25
