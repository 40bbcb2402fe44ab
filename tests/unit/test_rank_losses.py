"""What the first rank of a mesh makes of a step that fails: the ranks are stand-ins here."""

from __future__ import annotations

import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch

from common.engine.clock import PhaseClock
from common.engine.mesh_ranks import MeshRanks
from common.engine.rank_processes import RankProcesses
from common.engine.request import Request, Role
from common.engine.scheduler import ScheduledRequest
from common.engine.settings import EngineSettings
from common.errors import WorkerLost
from common.parallel.mesh import MeshShape
from common.types import RequestId, SamplingParams


class Bench:
    """A mesh of two ranks, the first of which fails in its step."""

    def __init__(self, error: RuntimeError, why_lost: str | None) -> None:
        self.rank = mock.Mock()
        self.rank.comm.shard.mesh = MeshShape(tp=2)
        self.rank.runner.draft_length = 0
        self.rank.run.side_effect = error
        self.processes = mock.Mock(spec=RankProcesses)
        self.processes.why_lost.return_value = why_lost
        self.ranks = MeshRanks(self.rank, mock.Mock(), self.processes)

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


@pytest.mark.parametrize(
    ("why_lost", "said"),
    [
        ("rank 1 of 2 was killed by SIGKILL", "^rank 1 of 2 was killed by SIGKILL$"),
        (None, "^the first rank failed: Connection closed by peer$"),
    ],
)
def test_a_collective_that_fails_is_told_by_the_rank_that_is_gone(
    why_lost: str | None, said: str
) -> None:
    bench = Bench(RuntimeError("Connection closed by peer"), why_lost)
    with pytest.raises(WorkerLost, match=said):
        bench.step()
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
