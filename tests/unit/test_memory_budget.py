"""Pages are what is left once weights, tables, the drafter and all slots have their memory; what does not fit is said in
numbers, with the largest values that do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from common.claims import MemoryKind
from common.device.backend import DeviceMemory
from common.device.cpu import CpuBackend
from common.device.ledger import Ledger
from common.engine import build_rank
from common.engine.budget import Budget, CacheNeed, num_pages_within
from common.engine.build import LoadedEngine, build_engine
from common.engine.build_rank import BuiltRank
from common.engine.device_memory import num_pages_for_ranks
from common.engine.settings import EngineSettings
from common.errors import ConfigError
from common.kv_cache.layout import Region, Retention
from common.kv_cache.pool import CachePool, RegionBuffer
from common.model.config import ModelConfig
from common.parallel.collectives import Communicator
from common.parallel.mesh import MeshShape
from tests.support.small_cache import small_layout, small_pool
from tests.support.thread_ranks import run_ranks
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

MIB = 2**20
NEED = CacheNeed(
    page_bytes=MIB,
    ring_bytes=2 * MIB,
    drafter_bytes=MIB,
    num_slots=4,
    max_context_length=1280,  # ten pages
)


def budget(usable_mib: int, *, fraction: float = 0.5, others_mib: int = 0) -> Budget:
    return Budget(
        device="cuda:0",
        total_bytes=int((usable_mib + others_mib) * MIB / fraction),
        fraction=fraction,
        others_bytes=others_mib * MIB,
    )


def pages(usable_mib: int, **changes: Any) -> int:
    values = {"weight_bytes": 90 * MIB, "table_bytes": 10 * MIB, **changes}
    return num_pages_within(budget(usable_mib), NEED, **values)


# What fits -------------------------------------------------------------------------------------------------------


def test_pages_are_what_weights_tables_drafter_and_rings_leave() -> None:
    assert pages(200) == 200 - 100 - 4 * 3
    assert pages(122) == 10


def test_what_others_use_is_not_ours() -> None:
    with_others = num_pages_within(
        budget(200, others_mib=30), NEED, weight_bytes=90 * MIB, table_bytes=10 * MIB
    )
    assert with_others == pages(200)


def test_a_chosen_number_of_pages_need_not_hold_the_longest_context() -> None:
    assert pages(117, num_pages=5) == 5


def test_need_is_what_a_pool_takes() -> None:
    layout = small_layout(dtype="bfloat16")
    need = CacheNeed.of(layout, num_slots=3, max_step_rows=6, max_context_length=512)
    pool = CachePool(layout, num_pages=7, num_slots=3, max_step_rows=6, device=torch.device("cpu"))
    assert pool.num_bytes == 7 * need.page_bytes + 3 * need.slot_bytes
    assert pool.buffers["drafter"].tensor.nbytes == 3 * need.drafter_bytes


# What does not ---------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_told_apart_from_contexts_that_do_not() -> None:
    with pytest.raises(ConfigError) as caught:
        pages(80)
    message = caught.value.message
    assert "the weights of this rank take 90.00 MiB and tables 10.00 MiB" in message
    assert "80.00 MiB may be used on cuda:0 (memory_fraction 0.5 of 160.00 MiB)" in message
    assert "give a memory_fraction above 0.62" in message


def test_no_fraction_is_advised_where_none_is_enough() -> None:
    with pytest.raises(ConfigError) as caught:
        pages(40)
    assert "spread them over more ranks" in caught.value.message
    assert "memory_fraction above" not in caught.value.message


def test_the_largest_values_that_fit_do_fit_and_larger_ones_do_not() -> None:
    with pytest.raises(ConfigError) as caught:
        pages(117)
    message = caught.value.message
    assert "the drafter's rows of 4 slots 4.00 MiB" in message
    assert "window rows and open groups 8.00 MiB" in message
    assert "max_context_length 1280 10.00 MiB of pages" in message
    advice = re.search(
        r"num_slots of at most (\d+) or a max_context_length of at most (\d+)", message
    )
    assert advice is not None
    slots, context = int(advice[1]), int(advice[2])
    held = {"weight_bytes": 90 * MIB, "table_bytes": 10 * MIB}
    for need, fits in (
        (replace(NEED, num_slots=slots), True),
        (replace(NEED, num_slots=slots + 1), False),
        (replace(NEED, max_context_length=context), True),
        (replace(NEED, max_context_length=context + 1), False),
    ):
        if fits:
            num_pages_within(budget(117), need, **held)
        else:
            with pytest.raises(ConfigError):
                num_pages_within(budget(117), need, **held)


def test_where_one_slot_is_all_its_longest_context_is_named() -> None:
    with pytest.raises(ConfigError, match="num_slots 1 with a max_context_length of at most 256"):
        pages(105)
    with pytest.raises(ConfigError, match="What fits is no request at all"):
        pages(102)


def test_more_pages_than_fit_are_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="num_pages is 40 for each data parallel group; 38 fit"):
        pages(150, num_pages=40)


def test_advice_counts_the_slots_of_all_groups() -> None:
    """As num_slots does; what is held may be of one group, or, on a CPU's first rank, of all of them."""
    held = {"weight_bytes": 90 * MIB, "table_bytes": 10 * MIB}
    both = replace(NEED, num_groups=2)
    with pytest.raises(
        ConfigError, match=r"rows of 4 slots 4.*num_slots of at most 4 or"
    ) as caught:
        num_pages_within(budget(117), both, **held)
    assert "groups 4" not in caught.value.message
    with pytest.raises(
        ConfigError, match=r"rows of 4 slots in each of 2 groups 8.*num_slots of at most 4 or"
    ):
        num_pages_within(budget(134), both.of_all_groups(), **held)
    assert num_pages_within(budget(144), both.of_all_groups(), **held) == (44 - 4 * 6) // 2


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01])
def test_a_fraction_is_a_share(fraction: float) -> None:
    with pytest.raises(ConfigError, match="memory_fraction is"):
        Budget(device="cpu", total_bytes=1, fraction=fraction, others_bytes=0)


# An engine within a budget -----------------------------------------------------------------------------------------

VALUES = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    tensors = random_tensors(ModelConfig.from_json(VALUES), seed=1)
    folder = save_checkpoint(tmp_path_factory.mktemp("budget") / "model", VALUES, tensors)
    return EngineSettings(checkpoint_dir=folder, num_slots=4, max_context_length=512)


def be_on(total_mib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with so much memory, half of which is in use."""
    total = int(total_mib * MIB)

    class Machine(CpuBackend):
        def memory(self, device: torch.device) -> DeviceMemory:
            return DeviceMemory(total_bytes=total, free_bytes=total // 2)

    monkeypatch.setattr(build_rank, "open_backend", lambda name: Machine())


def built_on(
    total_mib: float, settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> LoadedEngine:
    be_on(total_mib, monkeypatch)
    return build_engine(settings)


def ranks_of(settings: EngineSettings) -> list[BuiltRank]:
    return run_ranks(settings.mesh, lambda comm: build_rank.build_rank(settings, comm))


def test_a_cpu_has_no_budget_unless_one_is_given(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert built_on(1, settings, monkeypatch).num_pages == 4 * 4


def test_an_engine_holds_no_more_than_its_budget_and_not_a_page_less(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = build_engine(settings)
    page = free.ledger.by_kind()[MemoryKind.PAGES] // free.num_pages
    usable = free.ledger.num_bytes - 16 * page + 8 * page + page // 2
    # Nine tenths may be used, five are in use.
    loaded = built_on(usable / 0.4 / MIB, replace(settings, memory_fraction=0.9), monkeypatch)
    assert loaded.num_pages == loaded.engine.pool.num_pages == 8
    assert usable - page < loaded.ledger.num_bytes <= usable


@pytest.mark.parametrize("mesh", [MeshShape(dp=2), MeshShape(dp=2, tp=2, ep=4)], ids=str)
def test_no_rank_of_a_cpu_mesh_holds_more_than_its_budget_and_the_first_not_a_page_less(
    mesh: MeshShape, settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's memory has the cache of all groups, which is more than the others have."""
    meshed = replace(settings, mesh=mesh)
    free = ranks_of(meshed)
    page = free[0].ledger.by_kind()[MemoryKind.PAGES] // (free[0].sizes.num_pages // 2)
    pages_of_both = 2 * page
    assert free[0].sizes.num_pages == 16
    usable = free[0].ledger.num_bytes - 8 * pages_of_both + 5 * pages_of_both + page
    be_on(usable / 0.4 * mesh.num_ranks / MIB, monkeypatch)
    built = ranks_of(replace(meshed, memory_fraction=0.9))
    assert [rank.sizes.num_pages for rank in built] == [2 * 5] * mesh.num_ranks
    held = [rank.ledger.num_bytes for rank in built]
    assert usable - pages_of_both < held[0] <= usable
    assert max(held[1:]) < held[0]


@pytest.mark.parametrize("poorest", range(4))
def test_all_ranks_have_as_many_pages_as_the_one_with_the_least_room(poorest: int) -> None:
    """Guards a former gap: no test noticed when each rank had its own number."""

    def pages_of(comm: Communicator) -> int:
        usable_mib = 150 if comm.shard.rank == poorest else 200 + comm.shard.rank
        return num_pages_for_ranks(
            budget(usable_mib), NEED, Ledger(torch.device("cpu")), comm, wanted=None
        )

    assert run_ranks(MeshShape(dp=2, tp=2), pages_of) == [150 - 4 * 3] * 4


def test_a_group_needs_its_own_part_of_the_slots(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a former gap: with all slots counted in every group, pages would be too few where slots are many."""
    mesh = MeshShape(dp=2, ep=2)
    sized = replace(settings, mesh=mesh, num_slots=64, num_pages=64)
    free = ranks_of(sized)
    assert {rank.runner.pool.num_slots for rank in free} == {32}
    be_on(free[0].ledger.num_bytes / 0.4 * mesh.num_ranks / MIB, monkeypatch)
    built = ranks_of(replace(sized, memory_fraction=0.9))
    assert [rank.sizes.num_pages for rank in built] == [64] * 2


def test_rings_have_their_memory_before_any_page_has() -> None:
    """The drafter's among them: it is a page that finds no memory, were there too little after all."""
    allocated: list[Region] = []
    allocate = CachePool._allocate

    def record(pool: CachePool, region: Region) -> RegionBuffer:
        allocated.append(region)
        return allocate(pool, region)

    layout = small_layout()
    with mock.patch.object(CachePool, "_allocate", record):
        small_pool(layout)
    is_paged = [region.retention is Retention.PAGED for region in allocated]
    assert is_paged == sorted(is_paged), [region.name for region in allocated]
    assert set(allocated) == set(layout.regions)


def test_pages_that_no_slot_could_use_are_not_taken(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sized = replace(settings, memory_fraction=0.9)
    assert built_on(4000, sized, monkeypatch).num_pages == 16


def test_an_engine_that_does_not_fit_says_so_before_its_cache_is_allocated(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sized = replace(settings, memory_fraction=0.9)
    with pytest.raises(ConfigError, match=r"the weights of this rank take .* spread them"):
        built_on(1, sized, monkeypatch)
    with pytest.raises(ConfigError, match=r"num_pages is 100000 .*; \d+ fit"):
        built_on(16, replace(sized, num_pages=100_000), monkeypatch)
