"""State of a first rank whose own cache is apart from the copy of all groups: on a device, or in other host memory.

A real mesh of CPU ranks has this in tests/contract/test_mesh_exchange.py.
"""

from __future__ import annotations

import pytest
import torch

from common.device.select import open_backend
from common.engine.exchange import StateExchange
from common.engine.request import Request, Role
from common.engine.scheduler import ScheduledRequest
from common.kv_cache.blocks import read_blocks
from common.kv_cache.layout import PAGE_TOKENS
from common.kv_cache.pool import CachePool
from common.parallel.mesh import MeshShape
from common.parallel.shard import Shard
from common.types import RequestId, SamplingParams
from tests.support.small_cache import small_layout

NAMES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.device("cuda")),
    pytest.param("npu", marks=pytest.mark.device("npu")),
]
MESH = MeshShape(dp=2)
PAGES, SLOT = [3, 0], 1


def pool_of(num_groups: int, device: torch.device, *, seed: int) -> CachePool:
    """Cache of so many groups, full of rows that no other has."""
    pool = CachePool(
        small_layout(dtype="bfloat16"),
        num_pages=6 * num_groups,
        num_slots=2 * num_groups,
        max_step_rows=6,
        device=device,
    )
    generator = torch.Generator().manual_seed(seed)
    for buffer in pool.buffers.values():
        buffer.tensor.copy_(torch.randn(buffer.tensor.shape, generator=generator))
    return pool


def request_of(*, num_computed: int, role: Role, num_tokens: int = 200) -> Request:
    return Request(
        request_id=RequestId("r"),
        epoch=1,
        role=role,
        tokens=[1] * num_tokens,
        num_computed=num_computed,
        max_length=num_tokens + 10,
        sampling=SamplingParams(),
        slot=SLOT,
        block_table=PAGES,
    )


class Bench:
    """The first rank of two, each of which is a group of its own."""

    def __init__(self, name: str) -> None:
        self.own = pool_of(1, open_backend(name).device(0), seed=1)
        self.whole = pool_of(MESH.dp, torch.device("cpu"), seed=2)
        groups = [None, None]
        self.exchange = StateExchange(Shard(mesh=MESH, rank=0), groups, self.own, self.whole)
        self.before = self.everything()

    def everything(self) -> tuple[bytes, bytes]:
        """All of both."""
        parts = (
            read_blocks(pool, [*range(pool.num_pages)], slot)
            for pool in (self.own, self.whole)
            for slot in (0, SLOT)
        )
        own_0, own_1, whole_0, whole_1 = (each.numpy().tobytes() for each in parts)
        return own_0 + own_1, whole_0 + whole_1

    def blocks(self, page_ids: list[int]) -> tuple[bytes, bytes]:
        own, whole = (
            read_blocks(pool, page_ids, SLOT).numpy().tobytes() for pool in (self.own, self.whole)
        )
        return own, whole


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_arrived_in_the_copy_are_brought_to_where_they_are_run_on(name: str) -> None:
    bench = Bench(name)
    bench.exchange.adopt(request_of(num_computed=PAGE_TOKENS + 5, role=Role.GENERATE))
    own, whole = bench.blocks(PAGES)
    assert own == whole and bench.everything()[1] == bench.before[1], "the copy is read only"


@pytest.mark.parametrize("name", NAMES)
def test_pages_that_no_row_is_in_yet_stay_as_they_are(name: str) -> None:
    bench = Bench(name)
    bench.exchange.adopt(request_of(num_computed=PAGE_TOKENS, role=Role.GENERATE))
    first, second = bench.blocks(PAGES[:1]), bench.blocks(PAGES)
    assert first[0] == first[1] and second[0] != second[1]
    untouched = Bench(name)
    untouched.exchange.adopt(request_of(num_computed=0, role=Role.GENERATE))
    assert untouched.everything() == untouched.before, "a new prompt has no rows"


@pytest.mark.parametrize("name", NAMES)
def test_what_a_step_computed_for_a_hand_off_is_brought_to_the_copy(name: str) -> None:
    """Of a chunk that begins on the second page only that one travels, with the rings."""
    bench = Bench(name)
    request = request_of(num_computed=PAGE_TOKENS, role=Role.UNTIL_FIRST_TOKEN)
    bench.exchange.publish(0, [ScheduledRequest(request=request, num_tokens=72, num_draft=0)])
    second, both = bench.blocks(PAGES[1:]), bench.blocks(PAGES)
    assert second[0] == second[1] and both[0] != both[1]
    assert bench.everything()[0] == bench.before[0], "what runs is read only"


@pytest.mark.parametrize("name", NAMES)
def test_what_stays_here_is_not_copied(name: str) -> None:
    bench = Bench(name)
    request = request_of(num_computed=PAGE_TOKENS, role=Role.GENERATE)
    bench.exchange.publish(0, [ScheduledRequest(request=request, num_tokens=72, num_draft=0)])
    assert bench.everything() == bench.before


def test_a_part_shares_memory_with_its_whole_and_with_nothing_else() -> None:
    whole = pool_of(2, torch.device("cpu"), seed=1)
    part = whole.part(0, 2)
    assert part.shares_memory_with(whole) and whole.shares_memory_with(part)
    assert not pool_of(1, torch.device("cpu"), seed=1).shares_memory_with(whole)
