"""State of requests between the first rank, where hand-offs come and go, and the ranks that run them.

The first rank has the cache of all groups in host memory. State that arrives is told once to all ranks of a group; state
that a group computes for a hand-off is told by its leader. Knows blocks and ranks; no hand-offs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from common.engine.request import Request, Role
from common.engine.scheduler import ScheduledRequest
from common.kv_cache.blocks import num_block_bytes, read_blocks, write_blocks
from common.kv_cache.layout import PAGE_TOKENS, num_pages_for
from common.kv_cache.pool import CachePool
from common.parallel.mesh import MeshShape
from common.parallel.shard import Shard

Groups = Sequence[dist.ProcessGroup | None]
"""For each data parallel group the first rank with that group's ranks; None where that is the first rank alone."""


def open_groups(mesh: MeshShape, *, timeout: timedelta) -> Groups:
    """What state moves in; every rank of the initialised process group must call this."""
    members = [sorted({0, *(dp * mesh.tp + tp for tp in range(mesh.tp))}) for dp in range(mesh.dp)]
    return [
        dist.new_group(ranks, backend="gloo", timeout=timeout) if len(ranks) > 1 else None
        for ranks in members
    ]


class StateExchange:
    """One rank's part in it. Every rank must be called for the same requests in the same order.

    `pool` is what the rank runs on; `whole` is all groups' cache in host memory, on the first rank only, and has `pool`
    as its first part where that is host memory too.
    """

    def __init__(
        self, shard: Shard, groups: Groups, pool: CachePool, whole: CachePool | None
    ) -> None:
        self._shard = shard
        self._groups = groups
        self._pool = pool
        self._whole = whole
        self._shares_memory = whole is not None and pool.shares_memory_with(whole)

    def adopt(self, request: Request) -> None:
        """A request with computed rows joins its group: its ranks get the rows from the first rank."""
        if not request.num_computed or not self._takes_part(request.group):
            return
        group = self._groups[request.group]
        pages = request.block_table[: num_pages_for(request.num_computed)]
        slot = request.slot
        if self._whole is not None:
            data = read_blocks(self._whole, pages, slot)
        else:
            data = torch.empty(num_block_bytes(self._pool, pages, slot), dtype=torch.uint8)
        if group is not None:
            dist.broadcast(data, src=0, group=group)
        if self._shard.dp_rank == request.group and not self._shares_memory:
            write_blocks(self._pool, pages, slot, data)

    def publish(self, group: int, step: Sequence[ScheduledRequest]) -> None:
        """A group's step is done: what it computed for hand-offs comes to the first rank. Called there and by leaders."""
        leader = group * self._shard.mesh.tp
        if self._shard.rank not in (0, leader):
            return
        for scheduled in step:
            request = scheduled.request
            if request.role is not Role.UNTIL_FIRST_TOKEN:
                continue
            start, end = request.num_computed, request.num_computed + scheduled.num_tokens
            pages = request.block_table[start // PAGE_TOKENS : num_pages_for(end)]
            self._move(leader, pages, request.slot)

    def _move(self, leader: int, pages: list[int], slot: int) -> None:
        if self._shard.rank == 0 and leader == 0:
            if not self._shares_memory:
                assert self._whole is not None
                write_blocks(self._whole, pages, slot, read_blocks(self._pool, pages, slot))
        elif self._shard.rank == leader:
            dist.send(read_blocks(self._pool, pages, slot), 0)
        else:
            assert self._whole is not None
            data = torch.empty(num_block_bytes(self._whole, pages, slot), dtype=torch.uint8)
            dist.recv(data, leader)
            write_blocks(self._whole, pages, slot, data)

    def _takes_part(self, group: int) -> bool:
        return self._shard.rank == 0 or self._shard.dp_rank == group
