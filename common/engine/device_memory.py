"""What a rank holds on its device, entered in a ledger, and the pages that this leaves room for. Knows sizes; runs nothing."""

from __future__ import annotations

import torch

from common.claims import MemoryKind
from common.device.backend import Backend, DeviceMemory
from common.device.ledger import Ledger
from common.engine.budget import Budget, CacheNeed, num_pages_within
from common.engine.settings import EngineSettings
from common.kv_cache.layout import DRAFTER_REGION, Retention
from common.kv_cache.pool import CachePool
from common.model.dspark import DSparkModel
from common.model.memory import held_tensors
from common.parallel.collectives import Communicator

HOST_COPY = "cache of all groups"
"""Owner of what the first rank of a mesh keeps in host memory for hand-offs, its own part on a CPU left out."""


def ledger_of(model: DSparkModel) -> Ledger:
    """A ledger with everything that the model holds."""
    ledger = Ledger(model.device)
    held = held_tensors(model)
    ledger.claim("target", MemoryKind.WEIGHTS, held.target)
    ledger.claim("drafter", MemoryKind.WEIGHTS, held.drafter)
    ledger.claim("rotations", MemoryKind.WORKSPACE, held.tables)
    return ledger


def enter_cache(ledger: Ledger, pool: CachePool, whole: CachePool | None = None) -> None:
    """Every region is an owner of its own.

    `whole` is the first rank's copy of all groups' cache in host memory, of which a CPU's `pool` is a part.
    """
    if whole is not None:
        tensors = [buffer.tensor for buffer in whole.buffers.values()]
        ledger.claim(HOST_COPY, MemoryKind.HOST, tensors)
    for name, buffer in pool.buffers.items():
        if buffer.region.retention is Retention.PAGED:
            kind = MemoryKind.PAGES
        else:
            kind = MemoryKind.DRAFTER if name == DRAFTER_REGION else MemoryKind.RINGS
        if whole is not None and pool.shares_memory_with(whole):
            ledger.claim_part(name, kind, buffer.tensor)
        else:
            ledger.claim(name, kind, [buffer.tensor])


def budget_of(
    settings: EngineSettings, backend: Backend, device: torch.device, before: DeviceMemory
) -> Budget | None:
    """What a rank may hold, by what the device had `before`; None where memory is not budgeted.

    Ranks that are processes of one machine share its memory evenly.
    """
    fraction = settings.memory_fraction
    if fraction is None:
        fraction = backend.default_fraction
    if fraction is None:
        return None
    is_shared = backend.num_devices is None
    num_sharing = settings.mesh.num_ranks // settings.rendezvous.num_nodes if is_shared else 1
    return Budget(
        device=str(device),
        total_bytes=before.total_bytes // num_sharing,
        fraction=fraction,
        others_bytes=before.used_bytes // num_sharing,
    )


def num_pages_for_ranks(
    budget: Budget, need: CacheNeed, ledger: Ledger, comm: Communicator, *, wanted: int | None
) -> int:
    """Pages of one data parallel group that every rank has room for.

    All ranks must call this. Raises ConfigError when there is no room for the longest context, or for `wanted` pages.
    """
    held = ledger.by_kind()
    fits = num_pages_within(
        budget,
        need,
        weight_bytes=held[MemoryKind.WEIGHTS],
        table_bytes=held[MemoryKind.WORKSPACE],
        num_pages=wanted,
    )
    return _least(fits, comm, ledger.device)


def _least(count: int, comm: Communicator, device: torch.device) -> int:
    least = torch.tensor([count], device=device)
    for axis in (comm.tp, comm.dp):
        least = torch.stack(axis.gather(least)).min(0).values
    return int(least)
