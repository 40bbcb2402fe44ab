from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from common.sampling import noise as noise_module
from common.sampling.noise import Purpose, gumbel, uniform
from tests.unit.chi_square import FALSE_ALARM, p_value


def _seeds(count: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + count)


def _gumbel(seeds: Tensor, position: int = 7, purpose: Purpose = Purpose.TARGET) -> Tensor:
    return gumbel(
        seeds=seeds,
        positions=torch.full_like(seeds, position),
        purpose=purpose,
        vocab_size=256,
    )


def _uniform_of(noise: Tensor) -> Tensor:
    """The uniform variable that standard Gumbel noise is made of."""
    return (-(-noise.double()).exp()).exp()


def test_a_vocabulary_shard_is_a_slice_of_the_whole() -> None:
    seeds, positions = _seeds(5), _seeds(5, 90)
    whole = gumbel(seeds=seeds, positions=positions, purpose=Purpose.TARGET, vocab_size=1000)
    shards = [
        gumbel(
            seeds=seeds,
            positions=positions,
            purpose=Purpose.TARGET,
            vocab_size=250,
            vocab_offset=offset,
        )
        for offset in range(0, 1000, 250)
    ]
    assert torch.equal(torch.cat(shards, 1), whole)


def test_a_row_does_not_depend_on_its_batch() -> None:
    seeds, positions = _seeds(33), _seeds(33, 5)
    batch = gumbel(seeds=seeds, positions=positions, purpose=Purpose.DRAFT, vocab_size=77)
    for row in (0, 13, 32):
        alone = gumbel(
            seeds=seeds[row : row + 1],
            positions=positions[row : row + 1],
            purpose=Purpose.DRAFT,
            vocab_size=77,
        )
        assert torch.equal(alone[0], batch[row])


def test_large_batches_are_made_in_blocks_that_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _gumbel(_seeds(50))
    monkeypatch.setattr(noise_module, "_BLOCK_ELEMENTS", 3 * 256)
    assert torch.equal(_gumbel(_seeds(50)), whole)


def test_purposes_may_differ_per_row() -> None:
    seeds = _seeds(4)
    purposes = torch.tensor(list(Purpose))
    mixed = gumbel(seeds=seeds, positions=seeds, purpose=purposes, vocab_size=16)
    for row, purpose in enumerate(Purpose):
        alone = gumbel(seeds=seeds, positions=seeds, purpose=purpose, vocab_size=16)
        assert torch.equal(mixed[row], alone[row])


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize(("seed", "position", "depth"), [(0, 0, 0), (2**63 - 1, 1_000_000, 255)])
def test_noise_is_what_whole_number_arithmetic_gives(
    purpose: Purpose, seed: int, position: int, depth: int
) -> None:
    """What a seed means: change the reference only together with a note that seeded outputs change."""
    noise = gumbel(
        seeds=torch.tensor([seed]),
        positions=torch.tensor([position]),
        purpose=purpose,
        vocab_size=3,
        vocab_offset=129_277,
        depth=depth,
    )
    expected = [_reference(seed, position, purpose, depth, 129_277 + i) for i in range(3)]
    assert noise[0].tolist() == pytest.approx(expected, abs=1e-5)


def _reference(seed: int, position: int, purpose: int, depth: int, token: int) -> float:
    counter = (position * 256 + depth) * 4 + purpose
    key = _split_mix(seed * 0x9E3779B97F4A7C15 + counter * 0xDA942042E4DD58B5)
    bits = _split_mix(key + token * 0xD1342543DE82EF95) >> 32
    return -math.log(-math.log1p(-(bits + 0.5) / 2**32))


def _split_mix(x: int) -> int:
    x %= 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@pytest.mark.parametrize("seed", [0, 12345, 2**63 - 1])
def test_gumbel_noise_is_uniform_under_its_own_distribution(seed: int) -> None:
    noise = gumbel(
        seeds=torch.full((64,), seed),
        positions=torch.arange(64),
        purpose=Purpose.TARGET,
        vocab_size=4096,
    )
    cells = (_uniform_of(noise) * 128).long().flatten().bincount(minlength=128)
    assert p_value(cells, torch.ones(128)) > FALSE_ALARM


def test_neighbouring_tokens_seeds_and_positions_are_independent() -> None:
    """Pairs of neighbours fill a 16 x 16 table evenly, whichever of the three differs by one."""
    seeds = torch.arange(256).repeat_interleave(64)
    positions = torch.arange(64).repeat(256)
    cube = gumbel(seeds=seeds, positions=positions, purpose=Purpose.TARGET, vocab_size=16)
    digit = (_uniform_of(cube) * 16).long().view(256, 64, 16)
    for axis in range(3):
        first = digit.narrow(axis, 0, digit.shape[axis] - 1)
        second = digit.narrow(axis, 1, digit.shape[axis] - 1)
        # Every other pair, so that no number is in two of them.
        pairs = (first * 16 + second).index_select(axis, torch.arange(0, first.shape[axis], 2))
        cells = pairs.flatten().bincount(minlength=256)
        assert p_value(cells, torch.ones(256)) > FALSE_ALARM, f"{axis=}"


def test_purposes_depths_positions_and_seeds_are_uncorrelated() -> None:
    """Correlations of n = 2^17 numbers; each bound is six standard deviations, so 2e-9 per pair, 2e-7 in all."""
    seeds = torch.arange(512)
    variants = [_gumbel(seeds, purpose=purpose) for purpose in Purpose]
    variants += [_gumbel(seeds, position=position) for position in (8, 9, 7 + 2**20)]
    variants += [_gumbel(seeds + 512), _gumbel(seeds + 2**40)]
    variants += [
        gumbel(
            seeds=seeds,
            positions=torch.full_like(seeds, 7),
            purpose=Purpose.DRAFT,
            vocab_size=256,
            depth=depth,
        )
        for depth in (1, 4)
    ]
    columns = torch.stack([variant.flatten() for variant in variants]).double()
    correlation = columns.corrcoef() - torch.eye(len(variants))
    assert float(correlation.abs().max()) < 6.0 / math.sqrt(columns.shape[1])


def test_rows_are_not_permutations_of_one_another() -> None:
    """A hash that only xors the key into the token id gives rows that hold the same numbers in another order."""
    noise = gumbel(
        seeds=_seeds(200), positions=_seeds(200), purpose=Purpose.TARGET, vocab_size=1024
    )
    assert len(set(noise.flatten().tolist())) > 0.99 * noise.numel()


def test_the_extreme_hashes_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite number would win or lose against any logit: with top_k = 1 the only token left could lose."""
    extremes = torch.tensor([[0, 1, 2**32 - 129, 2**32 - 1]])
    monkeypatch.setattr(noise_module, "_high_bits", lambda rows: extremes)
    noise = gumbel(seeds=_seeds(1), positions=_seeds(1), purpose=Purpose.TARGET, vocab_size=4)[0]
    assert bool(noise.isfinite().all())
    assert noise.tolist() == sorted(noise.tolist(), reverse=True)
    assert float(noise[0]) == pytest.approx(math.log(2.0**33), abs=1e-3)


def test_uniform_noise_is_uniform_and_below_one() -> None:
    seeds = torch.arange(2**17)
    noise = uniform(seeds=seeds, positions=seeds % 7, purpose=Purpose.ACCEPT)
    assert float(noise.min()) >= 0.0 and float(noise.max()) < 1.0
    cells = (noise * 512).long().bincount(minlength=512)
    assert p_value(cells, torch.ones(512)) > FALSE_ALARM
