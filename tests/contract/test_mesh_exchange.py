"""Four real ranks: state of any group comes to the first rank and goes on from there, all of them say what memory they hold,
and the death of a rank is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common.claims import MemoryKind, RankMemory
from common.engine import build_rank
from common.engine.build import LoadedEngine, build_engine
from common.engine.build_rank import Sizes
from common.engine.device_memory import HOST_COPY
from common.engine.memory import Memory, RequestMemory
from common.engine.messages import StepMessage
from common.engine.request import Draft, Request, Role
from common.engine.settings import EngineSettings
from common.errors import WorkerLost
from common.kv_cache.blocks import num_block_bytes
from common.kv_cache.layout import DRAFTER_REGION, Region, Retention, num_pages_for
from common.kv_cache.pool import CachePool
from common.model.cache_layout import cache_layout
from common.model.config import ModelConfig
from common.model.dspark import DSparkModel
from common.parallel.collectives import Communicator
from common.parallel.link import FRAME_BYTES
from common.parallel.mesh import MeshShape
from common.types import RequestId, SamplingParams
from tests.support.engine_bench import Wanted, random_tokens
from tests.support.processes import children
from tests.support.thread_mesh import MeshBench
from tests.support.tiny_checkpoint import config_json, random_tensors, save_checkpoint

pytestmark = pytest.mark.slow

VALUES = config_json(hidden_size=32, vocab_size=64, dspark_noise_token_id=63, sliding_window=128)
MESH = MeshShape(dp=2, tp=2, ep=4)
GREEDY = SamplingParams(temperature=0.0, logprobs=0)
LENGTHS = (150, 40)
"""Of prompts: one with a whole page, and one without; chunks are shorter than either."""
NUM_TOKENS = 14


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """An engine, its driver and the settings it was built from."""

    bench: MeshBench
    settings: EngineSettings
    memory: tuple[RankMemory, ...]

    def add(self, length: int, role: Role, *, num_tokens: int = NUM_TOKENS) -> Request:
        wanted = Wanted(
            prompt=random_tokens(length, seed=length),
            max_length=length + num_tokens,
            sampling=GREEDY,
            role=role,
        )
        return self.bench.add(wanted, f"{role.value}-{length}")

    def rows(self, request: Request, region: Region) -> list[torch.Tensor]:
        """What continues the request, as views in the order of positions: `[layers, width]` each."""
        buffer = self.bench.engine.pool.buffers[region.name]
        size = buffer.rows_per_block
        is_paged = region.retention is Retention.PAGED
        return [
            buffer.tensor[
                :, request.block_table[row // size] if is_paged else request.slot, row % size
            ]
            for row in region.live_rows(request.num_computed)
        ]


def load(settings: EngineSettings) -> Loaded:
    loaded: LoadedEngine = build_engine(settings)
    memory = Memory(
        num_pages=loaded.num_pages,
        num_slots=loaded.num_slots,
        num_groups=loaded.engine.num_groups,
    )
    return Loaded(MeshBench(loaded.engine, memory), settings, loaded.memory)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    tensors = random_tensors(ModelConfig.from_json(VALUES), seed=1)
    folder = save_checkpoint(tmp_path_factory.mktemp("mesh") / "model", VALUES, tensors)
    return EngineSettings(
        checkpoint_dir=folder, num_slots=8, max_context_length=384, max_step_rows=64
    )


@pytest.fixture(scope="module")
def one(settings: EngineSettings) -> Loaded:
    return load(settings)


@pytest.fixture(scope="module")
def mesh(settings: EngineSettings) -> Iterator[Loaded]:
    loaded = load(replace(settings, mesh=MESH, checks_replicas=True))
    yield loaded
    loaded.bench.engine.close()
    assert not the_ranks()


def the_ranks() -> list[int]:
    return [rank for host in children(os.getpid()) for rank in children(host)]


def until_first_token(loaded: Loaded, length: int) -> Request:
    request = loaded.add(length, Role.UNTIL_FIRST_TOKEN)
    loaded.bench.drain()
    assert request.round == 1 and request.draft is not None
    return request


def continued(loaded: Loaded, source: Request, group: int) -> tuple[Request, RequestMemory]:
    """The request as the other side of a hand-off adopts it, in room of another group."""
    rooms = []
    while (room := loaded.bench.memory.reserve(source.max_length)).group != group:
        rooms.append(room)
    for each in rooms:
        each.release()
    assert source.draft is not None
    request = Request(
        request_id=RequestId(f"{source.request_id}-continued"),
        epoch=1,
        role=Role.GENERATE,
        tokens=list(source.tokens),
        num_computed=source.num_computed,
        max_length=source.max_length,
        sampling=source.sampling,
        slot=room.slot,
        block_table=room.take_all(),
        group=room.group,
        draft=Draft(proposal=source.draft.proposal),
    )
    return request, room


def test_state_moves_as_well_where_the_first_rank_runs_on_other_memory(
    one: Loaded, settings: EngineSettings
) -> None:
    """As on devices: what it runs on is apart from the copy of all groups, which is what hand-offs see. Guards a former
    gap: without a device, only memory that is both was ever tested. First, since a process is in one mesh at a time."""

    def pools_apart(
        settings: EngineSettings, sizes: Sizes, model: DSparkModel, comm: Communicator
    ) -> tuple[CachePool, CachePool]:
        layout = cache_layout(model.config, dtype=settings.dtype)
        own, whole = (
            sizes.pool(layout, num_groups=groups, device=model.device) for groups in (2, 1)
        )
        return own, whole

    # The other rank is another process, which has no copy anyway.
    with mock.patch.object(build_rank, "_pools", pools_apart):
        apart = load(replace(settings, mesh=MeshShape(dp=2, ep=2)))
    try:
        require_state_moves(one, apart)
        first, _ = apart.memory
        whole = apart.bench.engine.pool.num_bytes
        held = first.by_kind()
        assert held[MemoryKind.HOST] == whole
        cache = held[MemoryKind.PAGES] + held[MemoryKind.RINGS] + held[MemoryKind.DRAFTER]
        assert cache == whole // 2
    finally:
        apart.bench.engine.close()


def test_state_of_both_groups_goes_on_in_the_other_one(one: Loaded, mesh: Loaded) -> None:
    """Rows that a group computed are in the first rank's memory, whoever computed them; ranks that never saw a request get
    them from there. Requests of both groups run in the same steps, and neither group is the first rank's alone."""
    require_state_moves(one, mesh)


def require_state_moves(one: Loaded, mesh: Loaded) -> None:
    """From each of two groups to the other, with the tokens of one rank before and after."""
    pool = mesh.bench.engine.pool
    sources, expected = [], []
    for length in LENGTHS:
        alone = until_first_token(one, length)
        whole = one.add(length, Role.GENERATE)
        one.bench.drain()
        expected.append(one.bench.generated[whole.request_id])
        source = until_first_token(mesh, length)
        sources.append(source)
        assert source.tokens == alone.tokens
        for region in pool.layout.regions:
            torch.testing.assert_close(
                mesh.rows(source, region), one.rows(alone, region), atol=1e-4, rtol=1e-4
            )
        one.bench.remove(alone)
    assert [source.group for source in sources] == [0, 1]

    adopted = []
    for source in sources:
        request, room = continued(mesh, source, 1 - source.group)
        for region in pool.layout.regions:
            # What a hand-off writes into the memory of the first rank.
            ours, theirs = mesh.rows(source, region), mesh.rows(request, region)
            for here, there in zip(ours, theirs, strict=True):
                there.copy_(here)
        adopted.append(mesh.bench.adopt(request, room))
    mesh.bench.drain()
    for request, generated in zip(adopted, expected, strict=True):
        found = mesh.bench.generated[request.request_id]
        assert found.tokens == generated.tokens[1:]
        # The same drafts had the same fate: the drafter's rows came along.
        accepted = [result.num_accepted for result in generated.rounds[1:]]
        assert [result.num_accepted for result in found.rounds] == accepted
    for source in sources:
        mesh.bench.remove(source)
    mesh.bench.memory.check_integrity()


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("has_drafter_rows", [True, False])
def test_a_context_that_went_on_since_its_state_was_kept_is_caught_up_with(
    one: Loaded, mesh: Loaded, has_drafter_rows: bool, group: int
) -> None:
    """As a lease gives it to a new decode worker, none of whose ranks has seen the request before."""
    length, num_committed = LENGTHS[0], 5
    whole = one.add(length, Role.GENERATE)
    one.bench.drain()
    expected = one.bench.generated[whole.request_id]
    source = until_first_token(mesh, length)
    request, room = continued(mesh, source, group)
    for region in mesh.bench.engine.pool.layout.regions:
        if has_drafter_rows or region.name != DRAFTER_REGION:
            for here, there in zip(
                mesh.rows(source, region), mesh.rows(request, region), strict=True
            ):
                there.copy_(here)
    request.tokens[length:] = expected.tokens[:num_committed]
    request.draft = None
    request.drafter_valid_from = 0 if has_drafter_rows else length
    mesh.bench.adopt(request, room)
    mesh.bench.drain()
    found = mesh.bench.generated[request.request_id]
    assert found.tokens == expected.tokens[num_committed:]
    # Without rows to draft from there are too few of its own.
    assert any(result.num_draft for result in found.rounds) == has_drafter_rows
    mesh.bench.remove(source)
    mesh.bench.memory.check_integrity()


@pytest.mark.parametrize("early", [0, 1])
def test_a_group_that_ends_early_leaves_the_other_to_go_on(
    one: Loaded, mesh: Loaded, early: int
) -> None:
    """Three tokens are three steps at most, and 24 are at least four: a step brings no more than six."""
    lengths = {early: 3, 1 - early: 24}
    told = {
        loaded: [
            loaded.add(31 + group, Role.GENERATE, num_tokens=lengths[group]) for group in (0, 1)
        ]
        for loaded in (one, mesh)
    }
    assert [request.group for request in told[mesh]] == [0, 1]
    reports = mesh.bench.drain()
    ran = [{result.request.group for result in report.rounds} for report in reports]
    assert ran[0] == {0, 1} and ran[-1] == {1 - early}
    one.bench.drain()
    assert [request.tokens for request in told[mesh]] == [request.tokens for request in told[one]]


def test_state_that_arrives_is_told_once_to_all_ranks_of_its_group(
    mesh: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One broadcast, not a message for each rank that holds a replica."""
    source = until_first_token(mesh, LENGTHS[0])
    request, room = continued(mesh, source, 1)
    broadcast, told = dist.broadcast, list[int]()

    def counted(tensor: torch.Tensor, *, src: int, group: Any = None) -> None:
        if group is not None:  # what all ranks are told is no state
            told.append(tensor.nbytes)
        broadcast(tensor, src=src, group=group)

    def refused(tensor: torch.Tensor, rank: int) -> None:
        raise AssertionError(f"{tensor.nbytes} bytes for rank {rank} alone")

    monkeypatch.setattr(dist, "broadcast", counted)
    monkeypatch.setattr(dist, "send", refused)
    pages = request.block_table[: num_pages_for(request.num_computed)]
    num_bytes = num_block_bytes(mesh.bench.engine.pool, pages, request.slot)
    mesh.bench.adopt(request, room)
    mesh.bench.drain()
    assert told == [num_bytes]
    monkeypatch.undo()
    mesh.bench.remove(source)
    mesh.bench.memory.check_integrity()


def test_all_ranks_say_what_they_hold(one: Loaded, mesh: Loaded) -> None:
    (alone,) = one.memory
    first, *others = mesh.memory
    assert [memory.rank for memory in mesh.memory] == list(range(MESH.num_ranks))
    assert {memory.device for memory in mesh.memory} == {"cpu"}
    assert {claim.owner for claim in first.claims} == {
        HOST_COPY,
        *(claim.owner for claim in alone.claims),
    }
    whole = mesh.bench.engine.pool.num_bytes
    held = [memory.by_kind() for memory in mesh.memory]
    for each in held:
        cache = each[MemoryKind.PAGES] + each[MemoryKind.RINGS] + each[MemoryKind.DRAFTER]
        assert cache == whole // MESH.dp
        assert 0 < each[MemoryKind.WEIGHTS] < alone.by_kind()[MemoryKind.WEIGHTS]
    # Each has a quarter of the experts and, but for the last part of the vocabulary, as much of everything else.
    assert held[1][MemoryKind.WEIGHTS] == held[3][MemoryKind.WEIGHTS]
    assert [each[MemoryKind.HOST] for each in held] == [whole - whole // MESH.dp, 0, 0, 0]
    for memory in others:
        assert {claim.owner for claim in memory.claims} == {claim.owner for claim in alone.claims}


def test_more_than_one_frame_of_news_arrives(one: Loaded, mesh: Loaded) -> None:
    """Six long prompts are told of before one step."""
    told = {
        loaded: [loaded.add(length, Role.GENERATE) for length in range(355, 361)]
        for loaded in (one, mesh)
    }
    assert len(StepMessage(changes=tuple(told[mesh])).to_bytes()) > FRAME_BYTES
    for loaded in (one, mesh):
        loaded.bench.drain()
    assert [request.tokens for request in told[mesh]] == [request.tokens for request in told[one]]


def test_the_death_of_a_rank_is_named_by_the_step_it_breaks(mesh: Loaded) -> None:
    """Last, since nothing runs on this mesh afterwards."""
    mesh.add(LENGTHS[1], Role.GENERATE)
    mesh.bench.step()
    victims = the_ranks()
    assert len(victims) == MESH.num_ranks - 1
    os.kill(victims[1], signal.SIGKILL)
    with pytest.raises(WorkerLost, match=r"rank 2 of 4 \(dp 1, tp 0\) was killed by SIGKILL"):
        for _ in range(NUM_TOKENS):
            mesh.bench.step()
