"""Sums and gathers along an axis, and the bytes that they count as given away."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common.engine.exchange import open_groups
from common.parallel.collectives import Axis, Communicator, open_communicator
from common.parallel.mesh import MeshShape
from common.parallel.shard import Shard
from tests.support.thread_ranks import run_axis, run_ranks


def test_an_axis_of_one_rank_does_nothing_and_counts_nothing() -> None:
    axis, x = Axis("tp"), torch.arange(6.0).view(3, 2)
    assert axis.sum(x) is x
    assert axis.sum_parts(x, [3]) is x
    assert axis.gather_rows(x, [3]) is x
    assert axis.gather(x)[0] is x and len(axis.gather(x)) == 1
    assert Communicator(tp=axis).sent_bytes() == {}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_the_sum_in_place_and_in_the_same_bits(size: int) -> None:
    parts = torch.randn(size, 5, 8, generator=torch.Generator().manual_seed(size))

    def body(axis: Axis) -> torch.Tensor:
        x = parts[axis.index].clone()
        assert axis.sum(x) is x
        # Reduce-scatter and gather: all but one part is given away, twice.
        assert axis.sent_bytes == {"sum": 2 * x.nbytes * (size - 1) // size}
        return x

    sums = run_axis(size, body)
    torch.testing.assert_close(sums[0], parts.sum(0))
    assert all(torch.equal(each, sums[0]) for each in sums)


@pytest.mark.parametrize("size", [2, 4])
def test_gather_gives_everyones_rows_in_rank_order(size: int) -> None:
    def body(axis: Axis) -> list[torch.Tensor]:
        # Not contiguous, as a part of something larger may be.
        gathered = axis.gather(torch.full((3, 2), float(axis.index)).T)
        assert axis.sent_bytes == {"gather": 24 * (size - 1)}
        return gathered

    for gathered in run_axis(size, body):
        assert [float(each.max()) for each in gathered] == list(range(size))
        assert all(each.shape == (2, 3) for each in gathered)


LENGTHS = [[2, 1, 3], [0, 4, 0], [5, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_every_rank_gets_all_rows_however_many_each_brings(
    lengths: list[int], dtype: torch.dtype
) -> None:
    rows = torch.arange(sum(lengths) * 4).view(-1, 4).to(dtype)
    parts = torch.split(rows, lengths)

    def body(axis: Axis) -> torch.Tensor:
        mine = parts[axis.index]
        gathered = axis.gather_rows(mine, lengths)
        assert axis.sent_bytes == {"gather_rows": 2 * mine.nbytes}, "nothing is filled up"
        return gathered

    for gathered in run_axis(3, body):
        assert torch.equal(gathered, rows)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_rank_gets_the_sum_of_its_own_rows_however_few(lengths: list[int]) -> None:
    total = sum(lengths)
    parts = torch.randn(3, total, 4, generator=torch.Generator().manual_seed(total))

    def body(axis: Axis) -> torch.Tensor:
        mine = axis.sum_parts(parts[axis.index].clone(), lengths)
        assert axis.sent_bytes == {"sum_parts": (total - lengths[axis.index]) * 4 * 4}
        return mine

    torch.testing.assert_close(torch.cat(run_axis(3, body)), parts.sum(0))


class Spoken(NamedTuple):
    shard: tuple[int, int]
    in_group: list[int]
    across_groups: list[int]


def test_axes_of_a_mesh_connect_a_group_and_its_counterparts() -> None:
    """Ranks count tensor parallel places first."""

    def body(comm: Communicator) -> Spoken:
        rank = torch.tensor([comm.shard.rank])
        tp, dp = (torch.cat(axis.gather(rank)).tolist() for axis in (comm.tp, comm.dp))
        assert comm.sent_bytes() == {"tp.gather": 24, "dp.gather": 8}
        return Spoken((comm.shard.dp_rank, comm.shard.tp_rank), tp, dp)

    spoken = run_ranks(MeshShape(dp=2, tp=4, ep=8), body)
    assert spoken[0] == ((0, 0), [0, 1, 2, 3], [0, 4])
    assert spoken[6] == ((1, 2), [4, 5, 6, 7], [2, 6])


def test_every_group_has_the_devices_backend_and_a_deadline() -> None:
    """Guards a former gap: left to itself, torch bears with a rank for half an hour. Groups of one rank are none."""
    shard, timeout = Shard(mesh=MeshShape(dp=2, tp=3), rank=4), timedelta(seconds=45)
    with mock.patch.object(dist, "new_group", side_effect=lambda ranks, **_: ranks) as new_group:
        comm = open_communicator(shard, backend="nccl", timeout=timeout)
        groups: list[object] = [comm.tp.group, comm.dp.group]
        assert groups == [[3, 4, 5], [1, 4]]
        assert [call.args[0] for call in new_group.mock_calls] == [
            *([0, 1, 2], [3, 4, 5]),
            *([0, 3], [1, 4], [2, 5]),
        ]
        assert all(
            call.kwargs == {"backend": "nccl", "timeout": timeout} for call in new_group.mock_calls
        )
        new_group.reset_mock()
        groups = [*open_groups(MeshShape(dp=3), timeout=timeout)]
        assert groups == [None, [0, 1], [0, 2]]
        assert all(
            call.kwargs == {"backend": "gloo", "timeout": timeout} for call in new_group.mock_calls
        )
        new_group.reset_mock()
        open_communicator(Shard(mesh=MeshShape(tp=2), rank=0), backend="nccl", timeout=timeout)
        assert [call.args[0] for call in new_group.mock_calls] == [[0, 1]]


def test_ranks_that_meet_with_different_operations_fail_instead_of_hanging() -> None:
    """Of the harness that other tests stand on: a collective that a rank forgets must show."""

    def body(axis: Axis) -> object:
        x = torch.zeros(2)
        return axis.sum(x) if axis.index else axis.gather(x)

    with pytest.raises(AssertionError, match="different operations"):
        run_axis(2, body)


def test_a_rank_that_fails_alone_is_the_one_that_is_heard_of() -> None:
    def body(axis: Axis) -> torch.Tensor:
        if axis.index == 1:
            raise ValueError("only this one")
        return axis.sum(torch.zeros(2))

    with pytest.raises(ValueError, match="only this one"):
        run_axis(3, body)
