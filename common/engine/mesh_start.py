"""How the ranks of a mesh come together: processes, rendezvous, weights, then steps. Knows order; runs no step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from common.checkpoint.loader import load_config
from common.checkpoint.reader import Progress
from common.device.select import open_backend
from common.engine.build_rank import BuiltRank, Sizes, build_rank
from common.engine.exchange import StateExchange, open_groups
from common.engine.mesh_rank import Follower, MeshRank
from common.engine.mesh_ranks import MeshRanks
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


def start_mesh(
    settings: EngineSettings, *, on_progress: Progress | None = None
) -> tuple[MeshRanks, BuiltRank]:
    """Start this node's other ranks, meet those of other nodes, and load. This process is the first rank.

    Raises WorkerLost, CheckpointError or ConfigError with the first cause when a rank does not come that far.
    """
    if settings.rendezvous.node_rank:
        raise ConfigError("only the first node has a service; others run ranks only")
    _require_runnable(settings)
    num_local = _num_local(settings)
    world = settings.mesh.num_ranks
    host, store = _open_store(settings)
    # Replicas must be equal in every bit, and a matrix product's depend on how many threads share it.
    num_threads = max(1, torch.get_num_threads() // num_local)
    torch.set_num_threads(num_threads)
    processes = RankProcesses(
        settings, range(1, num_local), address=f"{host}:{store.port}", num_threads=num_threads
    )
    try:
        _wait_for(store, "here", range(1, world), settings, processes.why_lost_now)
        rank, built = _join(settings, store, rank=0, local_rank=0, on_progress=on_progress)
        _wait_for(store, "loaded", range(1, world), settings, processes.why_lost_now)
    except BaseException as error:
        # What the others do meanwhile fails because one of them has.
        reason = processes.why_lost() if isinstance(error, RuntimeError) else None
        processes.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
        if reason is not None:
            raise WorkerLost(reason) from error
        raise
    assert built.whole is not None
    return MeshRanks(rank, built.whole, processes), built


def start_node(settings: EngineSettings) -> RankProcesses:
    """Start the ranks of another node than the first, whose service they belong to."""
    num_local = _num_local(settings)
    first = settings.rendezvous.node_rank * num_local
    return RankProcesses(
        settings,
        range(first, first + num_local),
        address=settings.rendezvous.address,
        num_threads=max(1, torch.get_num_threads() // num_local),
    )


def run_follower(settings: EngineSettings, *, rank: int, local_rank: int, address: str) -> None:
    """Be another rank than the first, until the first says that it is over. Raises when it is gone."""
    host, _, port = address.rpartition(":")
    store = TCPStore(
        host, int(port), timeout=timedelta(seconds=settings.rendezvous.start_timeout_s)
    )
    store.set(f"here/{rank}", "")
    mesh_rank, _ = _join(settings, store, rank=rank, local_rank=local_rank, on_progress=None)
    store.set(f"loaded/{rank}", "")
    Follower(mesh_rank).follow()


def _join(
    settings: EngineSettings,
    store: TCPStore,
    *,
    rank: int,
    local_rank: int,
    on_progress: Progress | None,
) -> tuple[MeshRank, BuiltRank]:
    """Become a rank: groups first, which all ranks make in the same order, then weights and cache."""
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=settings.mesh.num_ranks,
        timeout=timedelta(seconds=settings.rendezvous.timeout_s),
    )
    shard = Shard(mesh=settings.mesh, rank=rank)
    comm = open_communicator(shard, backend=open_backend(settings.device).collectives)
    # Before anything is read: a rank that fails to load would be waited for here.
    groups = open_groups(settings.mesh)
    built = build_rank(settings, comm, local_rank=local_rank, on_progress=on_progress)
    exchange = StateExchange(shard, groups, built.runner.pool, built.whole)
    link = Link(rank)
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


def _num_local(settings: EngineSettings) -> int:
    return require_devices(
        settings.mesh,
        num_nodes=settings.rendezvous.num_nodes,
        num_devices=open_backend(settings.device).num_devices,
    )


def _wait_for(
    store: TCPStore,
    stage: str,
    ranks: Sequence[int],
    settings: EngineSettings,
    why_lost: Callable[[], str | None],
) -> None:
    """Until all ranks have come to a stage; asks, because a wait inside torch would outlast a rank that has died."""
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
