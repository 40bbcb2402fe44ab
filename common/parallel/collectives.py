"""Collectives along the axes of a mesh, counted. Knows process groups and tensors; no model.

Every rank of an axis calls the same method in the same order with tensors of the same shape. Sums come out in the same
bits on every rank of the axis, which replicas of a cache rely on. An axis of one rank does nothing and costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from common.parallel.shard import WHOLE, Shard


@dataclass(slots=True)
class Axis:
    """Ranks that act together, in rank order."""

    name: str
    size: int = 1
    index: int = 0
    """This rank's place among them."""
    group: dist.ProcessGroup | None = None
    """None for an axis of one rank."""
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """What this rank has given to others, by operation: the least that the operation can move, not what a library does."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, in place."""
        if self.size > 1:
            # A reduce-scatter and a gather, each of which gives away all but one part.
            self.sent_bytes["sum"] += 2 * x.nbytes * (self.size - 1) // self.size
            dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `x`."""
        if self.size == 1:
            return [x]
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.sent_bytes["gather"] += x.nbytes * (self.size - 1)
        dist.all_gather(parts, x, group=self.group)
        return parts

    def gather_rows(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """The rows of all ranks in rank order; rank i brings `lengths[i]` of them, and nothing is filled up."""
        if self.size == 1:
            return x
        mine = lengths[self.index]
        received = x.new_empty(sum(lengths), *x.shape[1:])
        self.sent_bytes["gather_rows"] += x.nbytes * (self.size - 1)
        # Everybody gets the same rows; a gather of tensors would have to be as long as the longest.
        given = torch.cat([x] * self.size)
        dist.all_to_all_single(received, given, list(lengths), [mine] * self.size, group=self.group)
        return received

    def sum_parts(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """The sum of all ranks' rows for this rank: `x` holds `lengths[i]` rows for each rank i, in order."""
        if self.size == 1:
            return x
        mine = lengths[self.index]
        received = x.new_empty(mine * self.size, *x.shape[1:])
        self.sent_bytes["sum_parts"] += x.nbytes - mine * x[0:1].nbytes
        dist.all_to_all_single(
            received, x.contiguous(), [mine] * self.size, list(lengths), group=self.group
        )
        # One order of summands on every rank.
        return received.view(self.size, mine, *x.shape[1:]).sum(0)


@dataclass(frozen=True, slots=True)
class Communicator:
    """One rank's axes."""

    shard: Shard = WHOLE
    tp: Axis = field(default_factory=lambda: Axis("tp"))
    """The ranks of its data parallel group."""
    dp: Axis = field(default_factory=lambda: Axis("dp"))
    """The ranks with its place in every data parallel group."""

    def sent_bytes(self) -> dict[str, int]:
        """Bytes given to others so far, by axis and operation, such as `tp.sum`."""
        return {
            f"{axis.name}.{operation}": count
            for axis in (self.tp, self.dp)
            for operation, count in sorted(axis.sent_bytes.items())
        }


def open_communicator(shard: Shard, *, backend: str, timeout: timedelta) -> Communicator:
    """The axes of a rank; every rank of the initialised process group must call this.

    `backend` is gloo, nccl or hccl; `timeout` bounds every collective.
    """
    mesh = shard.mesh
    tp_groups = [[dp * mesh.tp + tp for tp in range(mesh.tp)] for dp in range(mesh.dp)]
    dp_groups = [[dp * mesh.tp + tp for dp in range(mesh.dp)] for tp in range(mesh.tp)]
    # Every rank takes part in making every group, in the same order.
    tp = [_new_group(ranks, backend, timeout) for ranks in tp_groups][shard.dp_rank]
    dp = [_new_group(ranks, backend, timeout) for ranks in dp_groups][shard.tp_rank]
    return Communicator(
        shard,
        Axis("tp", mesh.tp, shard.tp_rank, tp),
        Axis("dp", mesh.dp, shard.dp_rank, dp),
    )


def _new_group(ranks: list[int], backend: str, timeout: timedelta) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    # Left to itself, torch bears with a rank for half an hour, whatever the group of all ranks was given.
    group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=timeout)
    return group
