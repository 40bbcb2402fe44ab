"""The prefill worker's engine loop. Knows the engine and the crossing; never sees the wire."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from common.engine.crossing import Crossing, Steps
from common.engine.request import Request, StepReport
from common.types import Proposal, RequestId, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkComputed:
    """Rows of more of a prompt are written, of all of it in the end; that the first token is sampled comes later.

    Numbers, because the request itself goes on changing on its own thread.
    """

    request_id: RequestId
    epoch: int
    num_computed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenSampled:
    """The token behind the prompt is known; what may follow it is still to be drafted."""

    request_id: RequestId
    epoch: int
    token_id: int
    logprob: TokenLogprob | None
    first_scheduled_at: float
    sampled_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFinished:
    """All that is to be handed over is there. The engine has let go of the request, and its rows stay as they are."""

    first: FirstTokenSampled
    proposal: Proposal
    finished_at: float

    @property
    def request_id(self) -> RequestId:
        return self.first.request_id

    @property
    def epoch(self) -> int:
        return self.first.epoch


Progress = ChunkComputed | FirstTokenSampled | PromptFinished
"""Of one request; in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReport:
    """One step, or what is known while it goes on."""

    progress: tuple[Progress, ...]
    step: StepReport | None
    """When it has ended, for those who count; its requests are not to be looked at."""


def run_prefill_loop(engine: Steps, crossing: Crossing[PrefillReport]) -> None:
    """Step while there is work, take commands between steps, sleep when there is neither."""
    while True:
        commands = crossing.take_commands(wait=not engine.has_work, idle=engine.keep_alive)
        if commands is None:
            return
        for command in commands:
            command(engine)
        if engine.has_work:
            teller = _Teller(crossing)
            report = engine.step(teller)
            for result in report.rounds:
                engine.remove(result.request.request_id)
            crossing.emit(PrefillReport(progress=tuple(teller.untold(report)), step=report))


class _Teller:
    """Passes on what a step says while it goes on, and knows what it has left for its end."""

    def __init__(self, crossing: Crossing[PrefillReport]) -> None:
        self._crossing = crossing
        self._first_tokens: dict[RequestId, FirstTokenSampled] = {}

    def computed(self, request: Request, num_computed: int) -> None:
        self._tell(_chunk(request, num_computed))

    def sampled(self, request: Request, token_id: int, logprob: TokenLogprob | None) -> None:
        request.timings.first_token = time.monotonic()
        first = self._first_tokens[request.request_id] = _first_token(request, token_id, logprob)
        self._tell(first)

    def untold(self, report: StepReport) -> Iterator[Progress]:
        for request in report.progressed:
            yield _chunk(request, request.num_computed)
        for result in report.rounds:
            request = result.request
            first = self._first_tokens.get(request.request_id)
            if first is None:  # steps of a mesh tell nothing before they end
                logprob = result.logprobs[0] if result.logprobs else None
                yield (first := _first_token(request, result.token_ids[0], logprob))
            yield PromptFinished(
                first=first,
                proposal=request.draft.proposal if request.draft else Proposal(),
                finished_at=time.monotonic(),
            )

    def _tell(self, progress: Progress) -> None:
        self._crossing.emit(PrefillReport(progress=(progress,), step=None))


def _chunk(request: Request, num_computed: int) -> ChunkComputed:
    return ChunkComputed(
        request_id=request.request_id, epoch=request.epoch, num_computed=num_computed
    )


def _first_token(
    request: Request, token_id: int, logprob: TokenLogprob | None
) -> FirstTokenSampled:
    return FirstTokenSampled(
        request_id=request.request_id,
        epoch=request.epoch,
        token_id=token_id,
        logprob=logprob,
        first_scheduled_at=request.timings.first_scheduled,
        sampled_at=request.timings.first_token,
    )
