"""Whether the ranks of a group hold the same cache, and where they do not. Knows ranks and rows; no steps."""

from __future__ import annotations

from collections import Counter

import torch

from common.engine.request import Request
from common.errors import ReplicasDiffer
from common.kv_cache.layout import Region
from common.kv_cache.pool import CachePool
from common.kv_cache.replicas import digests_by_row, row_digests
from common.parallel.collectives import Communicator
from common.parallel.shard import Shard

WHAT_TO_DO = (
    "its answers cannot be trusted and the worker ends; restart it. If the same rank differs again, replace its device; "
    "if others do, give all ranks of a group like devices and the same libraries"
)


def require_equal_replicas(
    pool: CachePool, comm: Communicator, request: Request, num_tokens: int
) -> None:
    """Compare the rows that continue a request over the ranks of its group, all of which must call this.

    Raises ReplicasDiffer on every one of them, with what, where and whose it is.
    """
    digests = row_digests(pool, request.block_table, request.slot, num_tokens)
    everywhere = _gather(pool, comm, torch.tensor(list(digests.values())))  # [ranks, regions]
    for region, values in zip(pool.layout.regions, everywhere.unbind(1), strict=True):
        if (values != values[0]).any():
            raise _difference(pool, comm, request, num_tokens, region)


def _difference(
    pool: CachePool, comm: Communicator, request: Request, num_tokens: int, region: Region
) -> ReplicasDiffer:
    """The first row that is not equal. Every rank of the group has seen that one is there, and comes here."""
    mine = digests_by_row(pool, region, request.block_table, request.slot, num_tokens)
    everywhere = _gather(pool, comm, mine)  # [ranks, layers, rows]
    differs = (everywhere != everywhere[0]).any(0)
    layer, row = divmod(int(differs.flatten().int().argmax()), differs.shape[1])
    shards = [
        Shard(mesh=comm.shard.mesh, rank=comm.shard.dp_rank * comm.tp.size + place)
        for place in range(comm.tp.size)
    ]
    odd = odd_places(everywhere[:, layer, row].tolist())
    layer_id, position = region.layer_ids[layer], region.live_rows(num_tokens).start + row
    who = " and ".join(str(shards[place]) for place in odd)
    how = "hold unlike rows" if len(odd) == len(shards) else "differs from the rest of its group"
    return ReplicasDiffer(
        f"{who} {how} after {num_tokens} tokens of request {request.request_id}: region {region.name}, layer {layer_id}, "
        f"row {position} is the first of {int(differs.sum())} unequal ones among {differs.numel()}; {WHAT_TO_DO}",
        metadata={
            "ranks": ",".join(str(shards[place].rank) for place in odd),
            "region": region.name,
            "layer": str(layer_id),
            "row": str(position),
        },
    )


def odd_places(values: list[int]) -> list[int]:
    """Places whose value is not what more than half have; all of them when nothing is."""
    (usual, count), *_ = Counter(values).most_common(1)
    if 2 * count <= len(values):
        return list(range(len(values)))
    return [place for place, value in enumerate(values) if value != usual]


def _gather(pool: CachePool, comm: Communicator, values: torch.Tensor) -> torch.Tensor:
    """All ranks' `values`, over the device which the group's collectives may be bound to; in host memory again."""
    return torch.stack(comm.tp.gather(values.to(pool.device))).cpu()
