"""Threads that play the ranks of a mesh in one process. The collectives' own code runs; only what carries bytes is ours.

Ranks that meet with different operations or shapes fail at once instead of hanging; so do those that wait for one that failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from common.parallel.collectives import Axis, Communicator
from common.parallel.mesh import MeshShape
from common.parallel.shard import Shard

WAIT_S = 240.0
"""Far above any step of a test, even one that compiles kernels first; only a rank that never comes is waited for so long."""

T = TypeVar("T")
Given = TypeVar("Given")


def run_ranks(mesh: MeshShape, body: Callable[[Communicator], T]) -> list[T]:
    """What `body` gives on every rank, in rank order. Raises what the first rank that failed by itself has raised."""
    comms = thread_communicators(mesh)
    failures: list[BaseException] = []

    def be_rank(comm: Communicator) -> T:
        try:
            with torch.inference_mode():
                return body(comm)
        except BaseException as error:
            failures.append(error)
            abort(comm)
            raise

    with ThreadPoolExecutor(mesh.num_ranks) as pool:
        futures = [pool.submit(be_rank, comm) for comm in comms]
    if failures:
        # The others only tell that a rank did not come.
        raise next(
            (e for e in failures if not isinstance(e, threading.BrokenBarrierError)), failures[0]
        )
    return [future.result() for future in futures]


def run_axis(size: int, body: Callable[[Axis], T]) -> list[T]:
    """What `body` gives on every rank of one tensor parallel group."""
    return run_ranks(MeshShape(tp=size), lambda comm: body(comm.tp))


def abort(comm: Communicator) -> None:
    """This rank will come to no meeting any more: whoever waits for it fails."""
    for axis in (comm.tp, comm.dp):
        if isinstance(axis.group, ThreadGroup):
            axis.group.meeting.barrier.abort()


def thread_communicators(mesh: MeshShape) -> list[Communicator]:
    """The axes of every rank; each belongs to one thread."""
    tp_meetings = [Meeting(mesh.tp) for _ in range(mesh.dp)]
    dp_meetings = [Meeting(mesh.dp) for _ in range(mesh.tp)]
    shards = [Shard(mesh=mesh, rank=rank) for rank in range(mesh.num_ranks)]
    return [
        Communicator(
            shard,
            _axis("tp", tp_meetings[shard.dp_rank], shard.tp_rank),
            _axis("dp", dp_meetings[shard.tp_rank], shard.dp_rank),
        )
        for shard in shards
    ]


def _axis(name: str, meeting: Meeting, index: int) -> Axis:
    group = ThreadGroup(meeting, index) if meeting.size > 1 else None
    return Axis(name, meeting.size, index, group)


class Meeting:
    """Where the threads of one group put what they give, and look at what the others gave."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self._given: list[tuple[str, object]] = [("", None)] * size

    def meet(self, index: int, operation: str, x: Given, take: Callable[[list[Given]], T]) -> T:
        """What `take` makes of what everybody gives; nobody goes on before all have taken."""
        self._given[index] = (operation, x)
        self.barrier.wait()
        operations = {name for name, _ in self._given}
        assert len(operations) == 1, f"ranks meet with different operations: {operations}"
        result = take([cast(Given, each) for _, each in self._given])
        self.barrier.wait()
        return result


class ThreadGroup(dist.ProcessGroup):
    """A process group whose ranks are threads; has what `Axis` uses. Torch's own signatures are overloaded."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        # Of torch's two constructors this is the one for groups without a store.
        super().__init__(index, meeting.size)  # type: ignore[call-arg]
        self.meeting = meeting
        self._index = index

    def allreduce(self, *args: Any, **options: Any) -> Any:
        """In rank order, so that every rank gets the same bits."""
        (x,) = args[0]
        x.copy_(self.meeting.meet(self._index, "sum", x, _sum))

    def allgather(self, *args: Any, **options: Any) -> Any:
        outputs, inputs = args[:2]
        given = self.meeting.meet(self._index, "gather", inputs[0], _copies)
        for room, x in zip(outputs[0], given, strict=True):
            assert room.shape == x.shape, f"{tuple(x.shape)} comes for {tuple(room.shape)}"
            room.copy_(x)

    def alltoall_base(self, *args: Any, **options: Any) -> Any:
        output, x, output_lengths, lengths = args[:4]
        parts = torch.split(x, lengths)

        def take(given: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
            mine = [each[self._index] for each in given]
            assert [len(part) for part in mine] == list(output_lengths), (
                f"{[len(part) for part in mine]} rows come for {list(output_lengths)}"
            )
            return torch.cat(mine)

        output.copy_(self.meeting.meet(self._index, "all_to_all", parts, take))

    def all_to_all_single(self, *args: Any, **options: Any) -> Any:
        """The name of the same in newer versions."""
        self.alltoall_base(*args)


def _sum(given: list[torch.Tensor]) -> torch.Tensor:
    kinds = {(each.shape, each.dtype) for each in given}
    assert len(kinds) == 1, f"ranks give {kinds} to one sum"
    return torch.stack(given).sum(0)


def _copies(given: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.clone() for each in given]
