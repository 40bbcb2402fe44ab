"""The first rank's side of a mesh: tells the others what to run and collects what comes of it. Knows no scheduling."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from common.engine.clock import PhaseClock
from common.engine.mesh_rank import MeshRank
from common.engine.messages import PlannedRun, StepMessage, outputs_from_bytes
from common.engine.outputs import RequestOutput
from common.engine.rank_losses import Losses
from common.engine.rank_processes import RankProcesses
from common.engine.ranks import GroupSteps
from common.engine.request import Request, StepListener
from common.engine.runner import StepRows
from common.errors import ReplicasDiffer, WorkerLost
from common.kv_cache.pool import CachePool
from common.types import RequestId

logger = logging.getLogger(__name__)


class MeshRanks:
    """All ranks of a mesh, as an engine's `Ranks`.

    `whole` is the cache of all groups in host memory, `processes` are this node's other ranks, `losses` knows of all.
    """

    def __init__(
        self, rank: MeshRank, whole: CachePool, processes: RankProcesses, losses: Losses
    ) -> None:
        self._rank = rank
        self._whole = whole
        self._processes = processes
        self._losses = losses
        self._is_lost = False
        mesh = rank.comm.shard.mesh
        self.num_groups = mesh.dp
        self._tp = mesh.tp
        self._changes: list[Request | RequestId] = []

    @property
    def pool(self) -> CachePool:
        return self._whole

    def add(self, request: Request) -> None:
        self._changes.append(request)

    def remove(self, request_id: RequestId) -> None:
        # Nobody may hear late of one that went before a step: its slot may have an owner with new rows by then.
        untold = [change for change in self._changes if _is_of(change, request_id)]
        if untold:
            self._changes = [change for change in self._changes if change is not untold[-1]]
        else:
            self._changes.append(request_id)

    def run(
        self, steps: GroupSteps, clock: PhaseClock, listener: StepListener | None
    ) -> list[list[RequestOutput | None]]:
        """Raises WorkerLost when a rank is gone, or ReplicasDiffer, and OutOfMemoryError when this one ran out; the mesh is
        of no use then.

        Rows are published when the step has ended, so `listener` has nothing to hear.
        """
        rows = StepRows.of(steps, self._rank.runner.draft_length)
        if not any(rows.target):
            return [[] for _ in steps]
        try:
            self._tell(steps, rows)
            outputs = [self._rank.run(steps[0], rows, clock)]
            self._rank.publish(0, steps[0])
            with clock.phase("copy"):
                outputs += [self._collect(group, steps) for group in range(1, self.num_groups)]
        except (torch.OutOfMemoryError, ReplicasDiffer):
            # No rank is gone; the others wait for us in the middle of the step.
            self._is_lost = True
            raise
        except RuntimeError as error:
            raise self._lost(error) from error
        return outputs

    def keep_alive(self) -> None:
        """A message without a step: the others' wait for the next one begins anew."""
        try:
            self._rank.link.tell_all(StepMessage().to_bytes())
        except RuntimeError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Let the other ranks end; those that are beyond being told are killed."""
        try:
            if not self._is_lost:
                self._rank.link.tell_all(StepMessage(is_last=True).to_bytes())
        except RuntimeError as error:
            logger.warning("the other ranks cannot be told to end: %s", error)
            self._is_lost = True
        if self._is_lost:
            self._processes.kill()
        else:
            self._processes.wait_ended()
        self._rank.link.close()

    def _tell(self, steps: GroupSteps, rows: StepRows) -> None:
        changes, self._changes = self._changes, []
        message = StepMessage(
            changes=tuple(
                self._in_group_terms(change) if isinstance(change, Request) else change
                for change in changes
            ),
            rows=rows,
            steps=tuple(
                tuple(
                    PlannedRun(
                        request_id=scheduled.request.request_id,
                        num_tokens=scheduled.num_tokens,
                        num_draft=scheduled.num_draft,
                    )
                    for scheduled in step
                )
                for step in steps
            ),
        )
        self._rank.link.tell_all(message.to_bytes())
        for change in changes:
            if isinstance(change, Request):
                self._rank.adopt(change)

    def _collect(self, group: int, steps: GroupSteps) -> list[RequestOutput | None]:
        if not steps[group]:
            return []
        self._rank.publish(group, steps[group])
        return outputs_from_bytes(self._rank.link.receive(group * self._tp))

    def _in_group_terms(self, request: Request) -> Request:
        first_page = request.group * (self._whole.num_pages // self.num_groups)
        first_slot = request.group * (self._whole.num_slots // self.num_groups)
        return replace(
            request,
            slot=request.slot - first_slot,
            block_table=[page - first_page for page in request.block_table],
        )

    def _lost(self, error: RuntimeError) -> WorkerLost:
        self._is_lost = True
        return WorkerLost(self._losses.why(error) or f"the first rank failed: {error}")


def _is_of(change: Request | RequestId, request_id: RequestId) -> bool:
    return isinstance(change, Request) and change.request_id == request_id
