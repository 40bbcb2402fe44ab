"""One rank of a mesh: applies what the first rank tells, runs its group's part of a step, answers. Knows no services."""

from __future__ import annotations

from collections.abc import Sequence

from common.engine.advance import advance_chunk, advance_round
from common.engine.clock import PhaseClock
from common.engine.exchange import StateExchange
from common.engine.messages import StepMessage, outputs_to_bytes
from common.engine.outputs import RequestOutput
from common.engine.replica_check import require_equal_replicas
from common.engine.request import Request
from common.engine.runner import Runner, StepRows
from common.engine.scheduler import ScheduledRequest
from common.parallel.collectives import Communicator
from common.parallel.link import Link
from common.types import RequestId


class MeshRank:
    """What every rank of a mesh does in a step."""

    def __init__(
        self, runner: Runner, exchange: StateExchange, link: Link, *, checks_replicas: bool
    ) -> None:
        self.runner = runner
        self._exchange = exchange
        self.link = link
        self._checks_replicas = checks_replicas

    @property
    def comm(self) -> Communicator:
        return self.runner.model.comm

    def adopt(self, request: Request) -> None:
        """A request joins its group. Ranks of other groups need not be told, but for the first."""
        self._exchange.adopt(request)
        if request.group == self.comm.shard.dp_rank:
            self.runner.adopt(request)

    def publish(self, group: int, step: Sequence[ScheduledRequest]) -> None:
        """A group has run its part of a step: what belongs to hand-offs comes to the first rank."""
        self._exchange.publish(group, step)

    def run(
        self, step: Sequence[ScheduledRequest], rows: StepRows, clock: PhaseClock
    ) -> list[RequestOutput | None]:
        """This rank's group's part of a step, which all ranks run at the same time.

        Raises ReplicasDiffer when replicas are checked and are not equal.
        """
        outputs = self.runner.run(step, rows, clock)
        if self._checks_replicas:
            for scheduled, output in zip(step, outputs, strict=True):
                num_computed = scheduled.request.num_computed + scheduled.num_tokens
                num_accepted = output.num_accepted if output else 0
                require_equal_replicas(
                    self.runner.pool, self.comm, scheduled.request, num_computed + num_accepted
                )
        return outputs


class Follower:
    """Every rank but the first: keeps its group's requests as the first rank's scheduler sees them."""

    def __init__(self, rank: MeshRank) -> None:
        self._rank = rank
        self._shard = rank.comm.shard
        self._requests: dict[RequestId, Request] = {}

    def follow(self) -> None:
        """Run steps until told that there are no more. Raises RuntimeError when the first rank is gone."""
        link = self._rank.link
        while not (message := StepMessage.from_bytes(link.hear())).is_last:
            self._apply(message)

    def _apply(self, message: StepMessage) -> None:
        for change in message.changes:
            if not isinstance(change, Request):
                self._requests.pop(change, None)
            elif change.group == self._shard.dp_rank:
                self._requests[change.request_id] = change
                self._rank.adopt(change)
        if not message.steps:
            return
        group = self._shard.dp_rank
        step = [
            ScheduledRequest(
                request=self._requests[run.request_id],
                num_tokens=run.num_tokens,
                num_draft=run.num_draft,
            )
            for run in message.steps[group]
        ]
        outputs = self._rank.run(step, message.rows, PhaseClock())
        if group and self._shard.is_leader and step:
            self._rank.publish(group, step)
            self._rank.link.send(0, outputs_to_bytes(outputs))
        for scheduled, output in zip(step, outputs, strict=True):
            if output is None:
                advance_chunk(scheduled)
            else:
                advance_round(scheduled, output)
