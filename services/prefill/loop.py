"""The prefill worker's engine loop. Knows the engine and the crossing; never sees the wire."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.crossing import Crossing, Steps
from common.engine.request import Request, RoundResult, StepReport
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
    """A prompt is computed to its end. The engine has let go of the request, and its rows stay as they are."""

    request_id: RequestId
    epoch: int
    token_id: int
    logprob: TokenLogprob | None
    proposal: Proposal
    first_scheduled_at: float
    sampled_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReport:
    """One step, or what is known while it goes on."""

    progress: tuple[ChunkComputed | FirstTokenSampled, ...]
    step: StepReport | None
    """When it has ended, for those who count; its requests are not to be looked at."""


def run_prefill_loop(engine: Steps, crossing: Crossing[PrefillReport]) -> None:
    """Step while there is work, take commands between steps, sleep when there is neither."""

    def on_computed(request: Request, num_computed: int) -> None:
        crossing.emit(PrefillReport(progress=(_chunk(request, num_computed),), step=None))

    while True:
        commands = crossing.take_commands(wait=not engine.has_work, idle=engine.keep_alive)
        if commands is None:
            return
        for command in commands:
            command(engine)
        if engine.has_work:
            report = engine.step(on_computed)
            for result in report.rounds:
                engine.remove(result.request.request_id)
            crossing.emit(_report(report))


def _report(report: StepReport) -> PrefillReport:
    chunks = (_chunk(request, request.num_computed) for request in report.progressed)
    first_tokens = (_first_token(result) for result in report.rounds)
    return PrefillReport(progress=(*chunks, *first_tokens), step=report)


def _chunk(request: Request, num_computed: int) -> ChunkComputed:
    return ChunkComputed(
        request_id=request.request_id, epoch=request.epoch, num_computed=num_computed
    )


def _first_token(result: RoundResult) -> FirstTokenSampled:
    request = result.request
    return FirstTokenSampled(
        request_id=request.request_id,
        epoch=request.epoch,
        token_id=result.token_ids[0],
        logprob=result.logprobs[0] if result.logprobs else None,
        proposal=request.draft.proposal if request.draft else Proposal(),
        first_scheduled_at=request.timings.first_scheduled,
        sampled_at=request.timings.first_token,
    )
