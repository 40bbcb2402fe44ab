"""The engine of a mesh gives what the engine of one rank gives, whichever groups are busy, idle, early or late.

Every rank is a thread with its own parts of the model; after each step the caches of a group's ranks are compared.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch

from common.engine.mesh_rank import MeshRank
from common.engine.replica_check import odd_places
from common.engine.request import Draft, Request
from common.errors import ReplicasDiffer
from common.kv_cache.layout import PAGE_TOKENS, Retention
from common.kv_cache.pool import CachePool
from common.model.dspark import DSparkModel
from common.parallel.collectives import Communicator
from common.parallel.mesh import MeshShape
from common.types import RequestId, SamplingParams, Verification
from tests.support.engine_bench import (
    GREEDY,
    EngineBench,
    Generated,
    Wanted,
    random_tokens,
    small_model,
)
from tests.support.thread_mesh import Meshed, mesh_bench

DRAFT_LENGTH = 5
SAMPLING = (
    GREEDY,
    SamplingParams(temperature=0.8, seed=3, logprobs=0),
    SamplingParams(temperature=1.0, seed=4, logprobs=0, verification=Verification.REJECTION),
    SamplingParams(temperature=0.9, top_k=12, top_p=0.8, seed=5, logprobs=0),
)
LENGTHS = (3, 40, 130, 9, 127, 20, 1, 60)
MESHES = [
    MeshShape(tp=2),
    MeshShape(tp=2, ep=2),
    MeshShape(dp=2, ep=2),
    MeshShape(dp=2, tp=2),
    MeshShape(dp=2, tp=2, ep=4),
    MeshShape(dp=4, ep=4),
]


def build(comm: Communicator | None = None) -> DSparkModel:
    """63 ids on two ranks: the second part is one shorter."""
    return small_model(drafter=True, comm=comm, vocab_size=63, dspark_noise_token_id=62)


def wanted(index: int, num_tokens: int = 12) -> Wanted:
    length = LENGTHS[index % len(LENGTHS)]
    return Wanted(
        prompt=random_tokens(length, seed=index, vocab_size=63),
        max_length=length + num_tokens + index % 3 * 5,
        sampling=SAMPLING[index % len(SAMPLING)],
    )


def meshed(mesh: MeshShape, max_step_rows: int = 4096) -> Meshed:
    return Meshed(mesh=mesh, build=build, draft_length=DRAFT_LENGTH, max_step_rows=max_step_rows)


def require_equal(found: Sequence[Generated], expected: Sequence[Generated]) -> None:
    """Tokens, log-probabilities, and drafts of the same fate: a drafter that is wrong never shows in text."""
    for ours, theirs in zip(found, expected, strict=True):
        ours.require_equal(theirs)
        assert [r.num_accepted for r in ours.rounds] == [r.num_accepted for r in theirs.rounds]
        for mine, other in zip(ours.rounds, theirs.rounds, strict=True):
            assert mine.confidences == pytest.approx(other.confidences, abs=1e-4)


@pytest.fixture(scope="module")
def alone() -> list[Generated]:
    """What eight requests give on one rank."""
    bench = EngineBench(build(), draft_length=DRAFT_LENGTH)
    return bench.run(*(wanted(i) for i in range(8)))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_batch_on_a_mesh_equals_one_on_a_single_rank(
    mesh: MeshShape, alone: list[Generated]
) -> None:
    """Greedy, coupled, rejection and filtered requests of all groups in the same steps, which end at different times."""
    with mesh_bench(meshed(mesh)) as bench:
        found = bench.run(*(wanted(i) for i in range(8)))
    require_equal(found, alone)
    assert any(r.num_accepted for g in found for r in g.rounds), "no draft was ever accepted"


def test_chunks_of_prompts_run_beside_generation_and_idle_groups(alone: list[Generated]) -> None:
    with mesh_bench(meshed(MeshShape(dp=2, tp=2, ep=4), max_step_rows=24)) as bench:
        found = bench.run(*(wanted(i) for i in range(8)))
    for ours, theirs in zip(found, alone, strict=True):
        # Full verification no longer fits every step, so rounds differ; what is greedy or coupled does not.
        if ours.rounds[0].request.sampling.verification is not Verification.REJECTION:
            ours.require_equal(theirs)


def test_one_request_runs_while_all_other_groups_are_idle(alone: list[Generated]) -> None:
    with mesh_bench(meshed(MeshShape(dp=4, ep=4))) as bench:
        found = bench.run(wanted(0))
        require_equal(found, alone[:1])


def test_requests_come_and_go_at_any_time(alone: list[Generated]) -> None:
    """A cancelled one leaves its slot and its name to the next; groups run dry while others go on."""
    with mesh_bench(meshed(MeshShape(dp=2, tp=2, ep=4))) as bench:
        early = [bench.add(wanted(i), f"early-{i}") for i in (0, 1, 3)]
        bench.step()
        doomed = bench.add(wanted(2), "doomed")
        bench.step()
        bench.remove(doomed)
        bench.engine.keep_alive()
        again = bench.add(wanted(5), "doomed", epoch=2)
        bench.step()
        late = [bench.add(wanted(i), f"late-{i}") for i in (4, 7)]
        bench.drain()
        bench.engine.keep_alive()
        last = bench.add(wanted(6), "last")
        bench.drain()
        named = dict(zip((0, 1, 3, 5, 4, 7, 6), (*early, again, *late, last), strict=True))
        for index, request in named.items():
            require_equal([bench.generated[request.request_id]], [alone[index]])


def test_a_request_that_goes_before_its_first_step_is_never_heard_of(
    alone: list[Generated],
) -> None:
    """Its slot is the next one's by then, with rows in it that were handed over. A follower that heard of the first
    late, or the first rank itself, would wipe them."""
    source = EngineBench(build(), draft_length=DRAFT_LENGTH)
    moved = source.add(wanted(1))
    source.step()
    with mesh_bench(meshed(MeshShape(dp=2, ep=2))) as bench:
        gone = bench.add(wanted(0), "gone")
        bench.remove(gone)
        room = bench.memory.reserve(moved.max_length)
        assert (room.group, room.slot) == (gone.group, gone.slot) == (0, 0)
        request = replace(
            moved,
            tokens=list(moved.tokens),
            slot=room.slot,
            block_table=room.take_all(),
            draft=Draft(proposal=moved.draft.proposal) if moved.draft else None,
        )
        copy_rows(source, moved, bench.engine.pool, request)
        bench.adopt(request, room)
        bench.drain()
        found = bench.generated[request.request_id]
    source.drain()
    assert found.tokens == source.generated[moved.request_id].tokens[1:] == alone[1].tokens[1:]


def copy_rows(source: EngineBench, moved: Request, pool: CachePool, request: Request) -> None:
    """What a hand-off moves, row by row."""
    for name, ours in source.pool.buffers.items():
        theirs, size = pool.buffers[name], ours.rows_per_block
        for row in ours.region.live_rows(moved.num_computed):
            if ours.region.retention is Retention.PAGED:
                assert size == PAGE_TOKENS // ours.region.ratio
                block, other = moved.block_table[row // size], request.block_table[row // size]
            else:
                block, other = moved.slot, request.slot
            theirs.tensor[:, other, row % size] = ours.tensor[:, block, row % size]


def test_the_next_owner_of_a_slot_sees_nothing_of_the_last_on_any_rank(
    alone: list[Generated],
) -> None:
    """Guards a former gap: no test noticed when the ranks of a mesh did not wipe what was there. Every rank turns its rings
    into NaN just before it hears of the next owner; hidden rows are gathered before they are masked, so NaN would show."""
    poisoned: list[tuple[int, int]] = []
    adopt = MeshRank.adopt

    def adopt_poisoned(rank: MeshRank, request: Request) -> None:
        pool = rank.runner.pool
        for buffer in pool.buffers.values():
            if buffer.region.retention is Retention.RING:
                buffer.tensor[:, request.slot] = torch.nan
        poisoned.append((rank.comm.shard.rank, request.slot))
        adopt(rank, request)

    with mesh_bench(meshed(MeshShape(tp=2))) as bench:
        (first,) = bench.run(wanted(2))
        with mock.patch.object(MeshRank, "adopt", adopt_poisoned):
            second = bench.add(wanted(1), "second")
            bench.drain()
        assert sorted(poisoned) == [(0, second.slot), (1, second.slot)] == [(0, 0), (1, 0)]
        require_equal([first, bench.generated[second.request_id]], [alone[2], alone[1]])


@pytest.mark.parametrize(
    ("seed", "mesh"),
    [(0, MeshShape(dp=4, ep=4)), (1, MeshShape(dp=4, ep=4)), (2, MeshShape(dp=4, tp=2))],
    ids=str,
)
def test_whatever_comes_and_goes_on_four_groups_each_request_gives_what_it_gives_alone(
    seed: int, mesh: MeshShape
) -> None:
    """Random arrivals, prompts, lengths, samplings and cancellations; groups run dry and fill again. A rank that waited for
    one that does not come would fail at the end of the collectives' patience."""
    rng = random.Random(seed)
    lengths = [rng.choice((1, 3, 4, 5, 30, 127, 128, 130)) for _ in range(20)]
    asked = [
        Wanted(
            prompt=random_tokens(length, seed=100 * seed + i, vocab_size=63),
            max_length=length + rng.randint(1, 18),
            sampling=replace(rng.choice(SAMPLING), seed=i),
        )
        for i, length in enumerate(lengths)
    ]
    source = EngineBench(build(), draft_length=DRAFT_LENGTH, num_slots=1)
    expected = [source.run(each)[0] for each in asked]

    num_busy: set[int] = set()
    cancelled: set[int] = set()
    running: dict[int, Request] = {}
    waiting = list(range(len(asked)))
    with mesh_bench(meshed(mesh)) as bench:
        while waiting or bench.engine.has_work:
            for _ in range(rng.choice((0, 0, 1, 3)) if bench.engine.has_work else 1):
                if waiting:
                    running[waiting[0]] = bench.add(asked[waiting[0]], f"r{waiting[0]}")
                    del waiting[0]
            running = {i: request for i, request in running.items() if request.room}
            if running and rng.random() < 0.15:
                doomed = rng.choice(sorted(running))
                bench.remove(running.pop(doomed))
                cancelled.add(doomed)
            if rng.random() < 0.1:
                bench.engine.keep_alive()
            report = bench.step()
            num_busy.add(len({result.request.group for result in report.rounds}))
        for i in range(len(asked)):
            found = bench.generated[RequestId(f"r{i}")]
            if i in cancelled:
                assert found.tokens == expected[i].tokens[: len(found.tokens)]
            else:
                require_equal([found], [expected[i]])
    assert cancelled and {1, 4} <= num_busy, f"{seed=} {cancelled=} {num_busy=}"


def test_a_replica_that_differs_is_named_with_its_region() -> None:
    """The check that all tests here stand on: one number of one rank's window is another. Of two nobody knows which is
    right."""
    mesh = MeshShape(tp=2)
    with (
        pytest.raises(ReplicasDiffer) as raised,
        mesh_bench(meshed(mesh)) as bench,
    ):
        bench.add(wanted(0), "r0")
        bench.step()
        bench.engine.pool.buffers["window"].tensor[0, 0, 1, 0] += 1.0
        bench.step()
    assert raised.value.metadata == {"ranks": "0,1", "region": "window", "layer": "0", "row": "1"}
    assert "rank 0 of 2 (dp 0, tp 0) and rank 1 of 2 (dp 0, tp 1) hold unlike rows" in str(
        raised.value
    )


@pytest.mark.parametrize(
    ("values", "odd"),
    [([5, 5, 7, 5], [2]), ([5, 7, 7], [0]), ([5, 7], [0, 1]), ([5, 5, 7, 7], [0, 1, 2, 3])],
)
def test_the_odd_one_is_who_differs_from_more_than_half(values: list[int], odd: list[int]) -> None:
    assert odd_places(values) == odd
