"""Blocks of a cache move whole between pools, and a digest tells whether replicas of a request's rows are equal."""

from __future__ import annotations

import pytest
import torch

from common.kv_cache.blocks import num_block_bytes, read_blocks, write_blocks
from common.kv_cache.layout import Region, Retention, num_pages_for
from common.kv_cache.pool import CachePool
from common.kv_cache.replicas import row_digests
from tests.support.small_cache import small_layout, small_pool

PAGES, SLOT = [7, 2, 9], 3
LENGTHS = (1, 4, 127, 128, 129, 300)


def noisy_pool(seed: int, dtype: str = "float32") -> CachePool:
    pool = small_pool(small_layout(dtype=dtype))
    generator = torch.Generator().manual_seed(seed)
    for buffer in pool.buffers.values():
        buffer.tensor.copy_(torch.randn(buffer.tensor.shape, generator=generator))
    return pool


def contents(pool: CachePool) -> dict[str, torch.Tensor]:
    return {name: buffer.tensor.clone() for name, buffer in pool.buffers.items()}


# Blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_move_between_pools_and_nothing_else_does(dtype: str) -> None:
    source, destination = noisy_pool(1, dtype), noisy_pool(2, dtype)
    before = contents(destination)
    data = read_blocks(source, PAGES, SLOT)
    assert data.dtype == torch.uint8
    assert len(data) == num_block_bytes(source, PAGES, SLOT)
    write_blocks(destination, PAGES, SLOT, data)
    for name, buffer in destination.buffers.items():
        moved = PAGES if buffer.region.retention is Retention.PAGED else [SLOT]
        others = [i for i in range(buffer.tensor.shape[1]) if i not in moved]
        assert torch.equal(buffer.tensor[:, moved], source.buffers[name].tensor[:, moved])
        assert torch.equal(buffer.tensor[:, others], before[name][:, others])


def test_blocks_may_have_other_places_in_the_other_pool() -> None:
    source, destination = noisy_pool(1), noisy_pool(2)
    write_blocks(destination, [0, 11, 4], 1, read_blocks(source, PAGES, SLOT))
    assert torch.equal(read_blocks(destination, [0, 11, 4], 1), read_blocks(source, PAGES, SLOT))
    assert row_digests(destination, [0, 11, 4], 1, 300) == row_digests(source, PAGES, SLOT, 300)


def test_a_part_of_a_pool_is_the_same_memory_with_numbers_of_its_own() -> None:
    """The second of two groups: pages 6 to 11 and slots 2 and 3 of the whole are its 0 to 5 and 0 and 1."""
    whole = noisy_pool(1)
    part = whole.part(1, 2)
    assert (part.num_pages, part.num_slots) == (6, 2)
    assert torch.equal(read_blocks(part, [1, 3], 1), read_blocks(whole, [7, 9], 3))
    write_blocks(part, [0], 0, read_blocks(noisy_pool(2), [5], 1))
    assert torch.equal(read_blocks(whole, [6], 2), read_blocks(noisy_pool(2), [5], 1))


def test_bytes_that_are_not_those_of_the_blocks_are_noticed() -> None:
    pool = noisy_pool(1)
    data = read_blocks(pool, PAGES, SLOT)
    with pytest.raises(AssertionError, match="belong to the blocks"):
        write_blocks(pool, PAGES, SLOT, torch.cat((data, data[:4])))


# Digests ---------------------------------------------------------------------------------------------------------


def live_rows(pool: CachePool, region: Region, num_tokens: int) -> list[tuple[int, int]]:
    """Block and row of everything that continues a request, one by one."""
    size = pool.buffers[region.name].rows_per_block
    rows = region.live_rows(num_tokens)
    if region.retention is Retention.PAGED:
        return [(PAGES[row // size], row % size) for row in rows]
    return [(SLOT, row % size) for row in rows]


def flip_bit(pool: CachePool, name: str, layer: int, block: int, row: int) -> None:
    """The lowest of a row's last number."""
    pool.buffers[name].tensor[layer, block, row].view(torch.uint8)[-4] ^= 1


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_one_flipped_bit_in_any_live_row_is_seen_and_names_its_region(num_tokens: int) -> None:
    pool = noisy_pool(1)
    expected = row_digests(pool, PAGES, SLOT, num_tokens)
    for region in pool.layout.regions:
        live = live_rows(pool, region, num_tokens)
        last = len(region.layer_ids) - 1
        for layer, (block, row) in [(0, live[0]), (last, live[-1])] if live else []:
            flip_bit(pool, region.name, layer, block, row)
            found = row_digests(pool, PAGES, SLOT, num_tokens)
            assert {name for name in found if found[name] != expected[name]} == {region.name}
            flip_bit(pool, region.name, layer, block, row)
    assert row_digests(pool, PAGES, SLOT, num_tokens) == expected


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_rows_that_are_not_live_do_not_matter(num_tokens: int) -> None:
    """All of them are other numbers in the second pool: other requests' blocks, and what was rejected or left behind."""
    ours, theirs = noisy_pool(1), noisy_pool(2)
    for region in ours.layout.regions:
        for block, row in live_rows(ours, region, num_tokens):
            tensor = ours.buffers[region.name].tensor
            theirs.buffers[region.name].tensor[:, block, row] = tensor[:, block, row]
    assert row_digests(ours, PAGES, SLOT, num_tokens) == row_digests(
        theirs, PAGES, SLOT, num_tokens
    )


def test_rows_that_have_changed_places_are_seen() -> None:
    pool = noisy_pool(1)
    expected = row_digests(pool, PAGES, SLOT, 300)
    assert num_pages_for(300) == len(PAGES)
    swapped = row_digests(pool, [PAGES[1], PAGES[0], PAGES[2]], SLOT, 300)
    assert {name for name in swapped if swapped[name] != expected[name]} == {"csa", "index", "hca"}


def test_digests_can_travel_as_integers() -> None:
    digests = row_digests(noisy_pool(1), PAGES, SLOT, 300)
    assert torch.tensor(list(digests.values())).tolist() == list(digests.values())
