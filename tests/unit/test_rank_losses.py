"""What is made of a step that fails, and of ranks that end: the ranks are stand-ins here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from common.engine import rank_losses
from common.engine.clock import PhaseClock
from common.engine.mesh_ranks import MeshRanks
from common.engine.rank_host import End, first_to_end
from common.engine.rank_losses import Losses, failed_with_another, leave_cause, leave_cause_at
from common.engine.rank_processes import RankProcesses
from common.engine.request import Request, Role
from common.engine.scheduler import ScheduledRequest
from common.engine.settings import EngineSettings
from common.errors import ReplicasDiffer, WorkerLost
from common.parallel.mesh import MeshShape
from common.types import RequestId, SamplingParams
from services.cli.ports import free_ports
from tests.support.waiting import WAIT_S


class Bench:
    """A mesh of two ranks, the first of which fails in its step."""

    def __init__(
        self, error: Exception | Callable[..., None], why_lost: str | None, *, num_nodes: int = 1
    ) -> None:
        self.rank = mock.Mock()
        self.rank.comm.shard.mesh = MeshShape(tp=2)
        self.rank.runner.draft_length = 0
        self.rank.run.side_effect = error
        self.processes = mock.Mock(spec=RankProcesses)
        self.processes.why_lost.return_value = why_lost
        self.processes.why_lost_now.return_value = why_lost
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        losses = Losses(self.processes, self.store, num_nodes=num_nodes)
        self.ranks = MeshRanks(self.rank, mock.Mock(), self.processes, losses)

    def step(self) -> None:
        request = Request(
            request_id=RequestId("r"),
            epoch=0,
            role=Role.GENERATE,
            tokens=[1, 2],
            max_length=8,
            sampling=SamplingParams(),
            slot=0,
            block_table=[0],
        )
        scheduled = ScheduledRequest(request=request, num_tokens=2, num_draft=0)
        self.ranks.run([[scheduled]], PhaseClock(), None)


CLOSED = RuntimeError("[pair.cc:553] Connection closed by peer [10.0.0.2]:23458. GLHF!")
KILLED_1 = "rank 1 of 2 (dp 0, tp 1) was killed by SIGKILL"


def fail_in_collective(*_: object) -> None:
    """As gloo does where a peer is gone: with an error of no special type."""
    group = mock.Mock()
    group.allreduce.side_effect = CLOSED
    dist.all_reduce(torch.zeros(1), group=group)


@pytest.mark.parametrize(
    ("why_lost", "said"),
    [(KILLED_1, KILLED_1), (None, f"the first rank failed: {CLOSED}")],
)
def test_a_collective_that_fails_is_told_by_the_rank_that_is_gone(
    why_lost: str | None, said: str
) -> None:
    bench = Bench(fail_in_collective, why_lost)
    with pytest.raises(WorkerLost) as lost:
        bench.step()
    assert lost.value.message == said
    bench.ranks.close()
    bench.processes.kill.assert_called_once_with()


def test_memory_that_runs_out_here_is_no_other_ranks_fault() -> None:
    """Guards a former bug: it was told as a failed collective, ten seconds later, and the cause was lost."""
    bench = Bench(torch.OutOfMemoryError("tried to allocate 2 GiB"), None)
    with pytest.raises(torch.OutOfMemoryError):
        bench.step()
    bench.processes.why_lost.assert_not_called()
    told_so_far = bench.rank.link.tell_all.call_count
    bench.ranks.close()
    # Who waits in the middle of a step hears nothing.
    assert bench.rank.link.tell_all.call_count == told_so_far
    bench.processes.kill.assert_called_once_with()


def test_replicas_that_differ_are_told_as_they_were_found() -> None:
    """The first rank has seen it for itself; the others, which end with it, would be told of ten seconds later."""
    found = ReplicasDiffer("rank 2 of 4 differs")
    bench = Bench(found, "rank 1 of 4 failed: rank 2 of 4 differs")
    with pytest.raises(ReplicasDiffer) as raised:
        bench.step()
    assert raised.value is found
    bench.processes.why_lost.assert_not_called()
    bench.ranks.close()
    bench.processes.kill.assert_called_once_with()


def test_a_cause_on_another_node_is_waited_for_and_told() -> None:
    """Guards a former bug: the first rank, where the collective had failed, was blamed with gloo's own words. The host of
    that node's ranks leaves the cause later than the collective fails."""
    bench = Bench(fail_in_collective, None, num_nodes=2)
    address = f"127.0.0.1:{bench.store.port}"
    news = threading.Timer(0.1, leave_cause_at, (address, KILLED_1))
    news.start()
    with mock.patch.object(rank_losses, "NEWS_S", WAIT_S), pytest.raises(WorkerLost) as lost:
        bench.step()
    news.join()
    assert lost.value.message == KILLED_1


def test_the_first_cause_of_any_node_is_told_and_none_that_follows() -> None:
    bench = Bench(fail_in_collective, rank_losses.ELSEWHERE, num_nodes=2)
    for cause in (KILLED_1, "rank 3 of 4 (dp 1, tp 1) failed: no memory"):
        leave_cause(bench.store, cause)
    with pytest.raises(WorkerLost) as lost:
        bench.step()
    assert lost.value.message == KILLED_1


def test_a_node_that_says_nothing_is_not_waited_for_without_end() -> None:
    """As one whose machine has failed; where the step fails of itself, nobody else is blamed."""
    with mock.patch.object(rank_losses, "NEWS_S", 0.1):
        with pytest.raises(WorkerLost) as lost:
            Bench(fail_in_collective, None, num_nodes=2).step()
        assert lost.value.message == "a rank on another node is gone; its node's log says why"
        with pytest.raises(WorkerLost) as lost:
            Bench(RuntimeError("no such kernel"), None, num_nodes=2).step()
        assert lost.value.message == "the first rank failed: no such kernel"


def test_a_wrong_address_is_nobody_elses_doing_and_a_rank_that_does_not_come_is() -> None:
    (port,) = free_ports("127.0.0.1", 1)
    soon = timedelta(seconds=0.1)
    with pytest.raises(RuntimeError) as missed:
        TCPStore("127.0.0.1", port, timeout=soon)
    assert not failed_with_another(missed.value)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError) as missed:
        store.wait(["here"], soon)
    assert failed_with_another(missed.value)


def test_a_first_node_that_is_gone_is_told_nothing_and_nobody_hears_of_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    leave_cause_at(f"127.0.0.1:{port}", KILLED_1)
    assert capfd.readouterr().err == ""


EXIT_1, KILLED = 1 << 8, int(signal.SIGKILL)
BIT_LOST = End(rank=3, how="failed: a bit is lost")
PEER_LOST = End(rank=1, how="lost another rank: closed by peer", is_cause=False)


@pytest.mark.parametrize(
    ("ended", "said", "told"),
    [
        # Guards a former bug: ranks that have ended are reaped in any order, and the first to be was told.
        ({1: EXIT_1, 3: EXIT_1}, (BIT_LOST, PEER_LOST), BIT_LOST),
        ({1: EXIT_1}, (BIT_LOST, PEER_LOST), BIT_LOST),
        ({1: EXIT_1}, (PEER_LOST, BIT_LOST), BIT_LOST),
        ({1: EXIT_1}, (PEER_LOST,), PEER_LOST),
        ({2: EXIT_1}, (), End(rank=2, how="ended with exit code 1")),
        ({1: EXIT_1, 2: KILLED}, (PEER_LOST,), End(rank=2, how="was killed by SIGKILL")),
    ],
    ids=["reaped late", "not reaped yet", "peer first", "peer only", "silent", "killed"],
)
def test_the_first_rank_to_end_is_the_cause(
    ended: dict[int, int], said: Sequence[End], told: End
) -> None:
    reasons, to_reasons = os.pipe()
    try:
        for end in said:
            os.write(to_reasons, f"{json.dumps(asdict(end))}\n".encode())
        end = first_to_end(ended, reasons)
        assert replace(end, how=end.how.partition(";")[0]) == told
    finally:
        os.close(reasons)
        os.close(to_reasons)


def test_a_host_of_ranks_that_does_not_end_is_not_waited_for_without_end() -> None:
    def wait(timeout: float | None = None) -> int:
        if timeout is not None:
            raise subprocess.TimeoutExpired("rank_host", timeout)
        return 0

    with mock.patch.object(subprocess, "Popen") as start:
        start.return_value.stdout = iter(())
        start.return_value.wait = wait
        settings = EngineSettings(checkpoint_dir=Path(), mesh=MeshShape(tp=2))
        RankProcesses(settings, [1], address="127.0.0.1:1", num_threads=1).kill()
    start.return_value.kill.assert_called_once_with()
