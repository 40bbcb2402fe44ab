"""A whole mesh of ranks in one process: real engine, schedulers, messages and model; threads in place of processes.

State that is handed over reaches no rank but the first here, which has all of it in the memory that its own group runs on.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from common.engine.config import EngineConfig
from common.engine.engine import Engine
from common.engine.exchange import StateExchange
from common.engine.memory import Memory, RequestMemory
from common.engine.mesh_rank import Follower, MeshRank
from common.engine.mesh_ranks import MeshRanks
from common.engine.rank_losses import Losses
from common.engine.rank_processes import RankProcesses
from common.engine.request import Request, StepReport
from common.engine.runner import Runner
from common.engine.scheduler import ScheduledRequest
from common.engine.settings import EngineSettings
from common.kv_cache.pool import CachePool
from common.model.cache_layout import cache_layout
from common.model.dspark import DSparkModel
from common.parallel.collectives import Communicator
from common.parallel.link import Link
from common.parallel.mesh import MeshShape
from common.types import RequestId
from tests.support.engine_bench import Generated, Wanted
from tests.support.thread_ranks import WAIT_S, abort, thread_communicators

SLOTS_EACH = 8
PAGES_EACH = 3 * SLOTS_EACH
"""Of each data parallel group."""

BuildModel = Callable[[Communicator], DSparkModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshed:
    """What the ranks are built from."""

    mesh: MeshShape
    build: BuildModel
    draft_length: int
    max_step_rows: int = 4096

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            draft_length=self.draft_length,
            max_step_rows=self.max_step_rows,
            max_context_length=384,
            max_uncommitted_rounds=2,
        )

    def pool(self, model: DSparkModel, num_groups: int) -> CachePool:
        return CachePool(
            cache_layout(model.config, dtype="float32"),
            num_pages=num_groups * PAGES_EACH,
            num_slots=num_groups * SLOTS_EACH,
            max_step_rows=self.draft_length + 1,
            device=model.device,
        )

    def rank(self, model: DSparkModel, pool: CachePool, wires: Wires) -> MeshRank:
        temperatures = torch.ones(self.draft_length)
        runner = Runner(
            model, pool, draft_length=self.draft_length, confidence_temperatures=temperatures
        )
        link = ThreadLink(model.comm.shard.rank, wires)
        return MeshRank(runner, NoExchange(), link, checks_replicas=True)


class MeshBench:
    """Drives the engine of a mesh: every round is committed at once, a request that is full is removed."""

    def __init__(self, engine: Engine, memory: Memory) -> None:
        self.engine = engine
        self.memory = memory
        self.generated: dict[RequestId, Generated] = {}
        self._held: dict[RequestId, RequestMemory] = {}

    def add(self, wanted: Wanted, name: str, *, epoch: int = 1) -> Request:
        """Schedule a prompt in the group that has the most room."""
        room = self.memory.reserve(wanted.max_length)
        return self.adopt(
            Request(
                request_id=RequestId(name),
                epoch=epoch,
                role=wanted.role,
                tokens=list(wanted.prompt),
                max_length=wanted.max_length,
                sampling=wanted.sampling,
                slot=room.slot,
                block_table=room.take_all(),
                group=room.group,
            ),
            room,
        )

    def adopt(self, request: Request, room: RequestMemory) -> Request:
        """Schedule a request that has its room already."""
        self._held[request.request_id] = room
        self.generated[request.request_id] = Generated()
        self.engine.add(request)
        return request

    def remove(self, request: Request) -> None:
        assert self.engine.remove(request.request_id) is request
        self._held.pop(request.request_id).release()

    def step(self) -> StepReport:
        report = self.engine.step()
        for result in report.rounds:
            request = result.request
            self.generated[request.request_id].take(result)
            self.engine.commit(request.request_id, result.round)
            if request.room == 0:
                self.remove(request)
        return report

    def drain(self) -> list[StepReport]:
        reports = []
        while self.engine.has_work:
            reports.append(self.step())
        return reports

    def run(self, *wanted: Wanted) -> list[Generated]:
        """Everything that the requests generate together, in their order."""
        requests = [self.add(w, f"r{i}") for i, w in enumerate(wanted)]
        self.drain()
        return [self.generated[request.request_id] for request in requests]


@contextlib.contextmanager
def mesh_bench(meshed: Meshed) -> Iterator[MeshBench]:
    """An engine whose ranks live until the block ends. Raises what a rank has failed with."""
    mesh = meshed.mesh
    first, *others = thread_communicators(mesh)
    wires = Wires(mesh.num_ranks)
    failures: list[BaseException] = []

    def follow(comm: Communicator) -> None:
        try:
            model = meshed.build(comm)
            Follower(meshed.rank(model, meshed.pool(model, 1), wires)).follow()
        except BaseException as error:
            failures.append(error)
            abort(comm)

    threads = [threading.Thread(target=follow, args=(comm,), daemon=True) for comm in others]
    for thread in threads:
        thread.start()
    model = meshed.build(first)
    whole = meshed.pool(model, mesh.dp)
    rank = meshed.rank(model, whole.part(0, mesh.dp), wires)
    nobody = RankProcesses(EngineSettings(checkpoint_dir=Path()), (), address="", num_threads=1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    losses = Losses(nobody, store, num_nodes=1)
    engine = Engine(MeshRanks(rank, whole, nobody, losses), meshed.engine_config())
    memory = Memory(num_pages=whole.num_pages, num_slots=whole.num_slots, num_groups=mesh.dp)
    try:
        yield MeshBench(engine, memory)
        memory.check_integrity()
        assert memory.num_free_slots == whole.num_slots
    finally:
        engine.close()
        for thread in threads:
            thread.join(WAIT_S)
        if failures:
            raise failures[0]
        assert not any(thread.is_alive() for thread in threads), "a rank was not told to end"


class Wires:
    """What has been told to each rank, and what each has sent to the first."""

    def __init__(self, num_ranks: int) -> None:
        self.told: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(num_ranks)]
        self.sent: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(num_ranks)]


class ThreadLink(Link):
    """A rank's end of the wires."""

    def __init__(self, rank: int, wires: Wires) -> None:
        super().__init__(rank)
        self._index = rank
        self._wires = wires

    def tell_all(self, payload: bytes) -> None:
        for told in self._wires.told[1:]:
            told.put(payload)

    def hear(self) -> bytes:
        return self._wires.told[self._index].get(timeout=WAIT_S)

    def send(self, rank: int, payload: bytes) -> None:
        assert rank == 0
        self._wires.sent[self._index].put(payload)

    def receive(self, rank: int) -> bytes:
        return self._wires.sent[rank].get(timeout=WAIT_S)

    def close(self) -> None:
        pass


class NoExchange(StateExchange):
    """Moves no state between ranks."""

    def __init__(self) -> None:
        pass

    def adopt(self, request: Request) -> None:
        pass

    def publish(self, group: int, step: Sequence[ScheduledRequest]) -> None:
        pass
