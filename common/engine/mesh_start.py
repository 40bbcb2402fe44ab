"""How the ranks of a mesh come together: processes, rendezvous, weights, then steps. Knows order; runs no step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from common.checkpoint.loader import load_config
from common.checkpoint.read_options import Progress
from common.claims import RankMemory
from common.device.select import open_backend
from common.engine.build_rank import BuiltRank, Sizes, build_rank
from common.engine.exchange import StateExchange, open_groups
from common.engine.mesh_rank import Follower, MeshRank
from common.engine.mesh_ranks import MeshRanks
from common.engine.rank_losses import Losses, failed_with_another, leave_cause
from common.engine.rank_processes import RankProcesses
from common.engine.settings import EngineSettings
from common.errors import ConfigError, WorkerLost
from common.model.divisible import divisible
from common.parallel.collectives import open_communicator
from common.parallel.link import Link
from common.parallel.mesh import require_devices
from common.parallel.shard import Shard

POLL_S = 0.02
LOOPBACK = "127.0.0.1"
NUM_THREADS = "num_threads"
"""Where the store has how many threads every rank computes with."""
MEMORY = "memory"
"""Where the store has what each rank holds, once all are ready."""

Meet = Callable[[str], None]
"""Returns when all ranks have come to a stage, which it names.

Before the first collective and after whatever takes ranks differently long: collectives bear with nobody for as long as
another node may take to come, or a slow disk to be read.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedMesh:
    """A mesh whose ranks are ready to run, as the first one sees it."""

    ranks: MeshRanks
    first: BuiltRank
    memory: tuple[RankMemory, ...]
    """What every rank holds, in their order."""


def start_mesh(settings: EngineSettings, *, on_progress: Progress | None = None) -> StartedMesh:
    """Start this node's other ranks, meet those of other nodes, and load. This process is the first rank.

    Raises WorkerLost, CheckpointError or ConfigError with the first cause when a rank does not come that far.
    """
    if settings.rendezvous.node_rank:
        raise ConfigError("only the first node has a service; others run ranks only")
    _require_runnable(settings)
    num_local = _num_local(settings)
    world = settings.mesh.num_ranks
    host, store = _open_store(settings)
    num_threads = _num_threads_a_rank(num_local)
    # Replicas must be equal in every bit, and a matrix product's depend on how many threads share it: what suits this
    # node holds for ranks of others, too, however many cores those have.
    store.set(NUM_THREADS, str(num_threads))
    torch.set_num_threads(num_threads)
    processes = RankProcesses(
        settings, range(1, num_local), address=f"{host}:{store.port}", num_threads=num_threads
    )
    losses = Losses(processes, store, num_nodes=settings.rendezvous.num_nodes)
    try:
        meet = functools.partial(_gather, store, range(1, world), settings, losses.why_now)
        rank, built = _join(settings, store, meet, on_progress=on_progress)
    except BaseException as error:
        # What the others do meanwhile fails because one of them has.
        reason = losses.why(error) if isinstance(error, RuntimeError) else None
        processes.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
        if reason is not None:
            raise WorkerLost(reason) from error
        raise
    assert built.whole is not None
    return StartedMesh(
        ranks=MeshRanks(rank, built.whole, processes, losses),
        first=built,
        memory=tuple(
            RankMemory.from_json(store.get(f"{MEMORY}/{each}").decode()) for each in range(world)
        ),
    )


def start_node(settings: EngineSettings) -> RankProcesses:
    """Start the ranks of another node than the first, whose service they belong to."""
    num_local = _num_local(settings)
    first = settings.rendezvous.node_rank * num_local
    return RankProcesses(
        settings,
        range(first, first + num_local),
        address=settings.rendezvous.address,
        num_threads=_num_threads_a_rank(num_local),
    )


def run_follower(settings: EngineSettings, *, rank: int, local_rank: int, address: str) -> None:
    """Be another rank than the first, until the first says that it is over. Raises when it is gone."""
    host, _, port = address.rpartition(":")
    store = TCPStore(
        host, int(port), timeout=timedelta(seconds=settings.rendezvous.start_timeout_s)
    )
    torch.set_num_threads(int(store.get(NUM_THREADS)))
    meet = functools.partial(_arrive, store, rank)
    try:
        mesh_rank, _ = _join(settings, store, meet, rank=rank, local_rank=local_rank)
        Follower(mesh_rank).follow()
    except Exception as error:
        # The first rank hears of the end of its own node's processes only.
        if not failed_with_another(error):
            shard, reason = Shard(mesh=settings.mesh, rank=rank), str(error).partition("\n")[0]
            leave_cause(store, f"{shard} failed: {reason}")
        raise


def _join(
    settings: EngineSettings,
    store: TCPStore,
    meet: Meet,
    *,
    rank: int = 0,
    local_rank: int = 0,
    on_progress: Progress | None = None,
) -> tuple[MeshRank, BuiltRank]:
    """Become a rank: groups first, which all ranks make in the same order, then weights and cache."""
    timeout = timedelta(seconds=settings.rendezvous.timeout_s)
    meet("here")
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=settings.mesh.num_ranks,
        timeout=timeout,
    )
    shard = Shard(mesh=settings.mesh, rank=rank)
    backend = open_backend(settings.device).collectives
    comm = open_communicator(shard, backend=backend, timeout=timeout)
    # Before anything is read: a rank that fails to load would be waited for here.
    groups = open_groups(settings.mesh, timeout=timeout)
    built = build_rank(
        settings,
        comm,
        local_rank=local_rank,
        on_progress=on_progress,
        on_loaded=lambda: meet("loaded"),
    )
    exchange = StateExchange(shard, groups, built.runner.pool, built.whole)
    link = Link(rank)
    store.set(f"{MEMORY}/{rank}", built.ledger.of_rank(rank).to_json())
    meet("ready")
    return MeshRank(built.runner, exchange, link, checks_replicas=settings.checks_replicas), built


def _open_store(settings: EngineSettings) -> tuple[str, TCPStore]:
    host, _, port = (settings.rendezvous.address or f"{LOOPBACK}:0").rpartition(":")
    store = TCPStore(
        host,
        int(port),
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=settings.rendezvous.start_timeout_s),
    )
    return host, store


def _require_runnable(settings: EngineSettings) -> None:
    """What can be refused before anything is started."""
    config = load_config(settings.checkpoint_dir)
    divisible(config).require_divided_by(settings.mesh)
    Sizes.of(settings, config)


def _num_threads_a_rank(num_local: int) -> int:
    """This node's threads, shared by its ranks."""
    return max(1, torch.get_num_threads() // num_local)


def _num_local(settings: EngineSettings) -> int:
    return require_devices(
        settings.mesh,
        num_nodes=settings.rendezvous.num_nodes,
        num_devices=open_backend(settings.device).num_devices,
    )


def _arrive(store: TCPStore, rank: int, stage: str) -> None:
    """How every rank but the first meets the others."""
    store.set(f"{stage}/{rank}", "")
    store.wait([stage])


def _gather(
    store: TCPStore,
    ranks: Sequence[int],
    settings: EngineSettings,
    why_lost: Callable[[], str | None],
    stage: str,
) -> None:
    """How the first rank meets the others; asks, because a wait inside torch would outlast a rank that has died."""
    deadline = time.monotonic() + settings.rendezvous.start_timeout_s
    missing = list(ranks)
    while missing := [rank for rank in missing if not store.check([f"{stage}/{rank}"])]:
        if (reason := why_lost()) is not None:
            raise WorkerLost(reason)
        if time.monotonic() > deadline:
            raise WorkerLost(
                f"ranks {', '.join(map(str, missing))} of {settings.mesh} were not {stage} "
                f"within {settings.rendezvous.start_timeout_s} s"
            )
        time.sleep(POLL_S)
    store.set(stage, "")
