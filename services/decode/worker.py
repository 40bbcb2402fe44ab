"""The decode worker's requests from reservation to release. Knows states and rounds; no messages and no tensors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.engine.memory import Memory
from common.engine.meter import StepMeter, follow_engine
from common.engine.request import Request, StepReport
from common.engine.thread import EngineThread, Steps
from common.errors import (
    Draining,
    DuplicateRequest,
    InvalidRequest,
    RequestAborted,
    ServingError,
    TransferFailed,
    WorkerLost,
)
from common.rpc.worker_info import WorkerIdentity
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.tracing import OFF, Tracing
from common.transfer.engines import Engines
from common.transfer.handoff import CacheContract, HandoffResult
from common.transfer.memory import PoolMemory
from common.types import RequestContext, RequestId
from services.decode.commits import CommitOrder, Outbox, UncommittedRounds
from services.decode.events import Admitted, Event, Failed, Finished, Verified
from services.decode.gauges import follow_requests
from services.decode.intake import Intake
from services.decode.loop import run_decode_loop
from services.decode.meetings import Meetings
from services.decode.quarantine import Quarantine
from services.decode.requests import (
    adopted_request,
    prompt_request,
    require_agreement,
    require_servable,
)
from services.decode.reservations import Reservation, Reservations, ReservationState
from services.decode.senders import Senders
from services.decode.trace import RequestTrace

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 5.0
"""For a request that was told to end: it waits for a step of the engine."""


@dataclass(slots=True, kw_only=True)
class Admission:
    """A router's wish to run a reservation."""

    context: RequestContext
    outbox: Outbox
    rounds: UncommittedRounds
    """Of the context as it was admitted; begun anew when the request runs, which may be a first token later."""
    trace: RequestTrace


class DecodeWorker:
    """Everything that routers and prefill workers ask of a decode worker. Lives on the event loop."""

    def __init__(
        self,
        engine: Steps,
        *,
        identity: WorkerIdentity,
        memory: PoolMemory,
        engines: Engines,
        metrics: WorkerMetrics,
        reservation_s: float,
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing = OFF,
    ) -> None:
        self.identity = identity
        self._tracing = tracing
        self.room = Memory(
            num_pages=identity.num_pages,
            num_slots=identity.num_slots,
            num_groups=identity.num_groups,
        )
        self.reservations = Reservations(self.room, lifetime_s=reservation_s, clock=clock)
        self.meetings = Meetings(
            memory=memory,
            contract=CacheContract(
                model_fingerprint=identity.model_fingerprint, layout=memory.layout
            ),
            engines=engines,
            generation=identity.generation,
            metrics=metrics.transfer,
        )
        self.metrics = metrics
        self._engines = engines
        self.intake = Intake(
            reservations=self.reservations,
            memory=memory,
            meetings=self.meetings,
            metrics=metrics.transfer,
            on_ready=self._on_ready,
            on_failed=self.end,
        )
        self._senders = Senders()
        self.quarantine = Quarantine(self.reservations, self._senders.stop, clock=clock)
        self.engine = EngineThread(
            engine, run_decode_loop, on_report=self._on_step, on_crash=self._on_crash
        )
        self.is_draining = False
        self._admissions: dict[str, Admission] = {}
        self._running: dict[RequestId, Reservation] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._clock = clock
        self._num_uncomputed: dict[RequestId, int] = {}
        """Prompt tokens of requests whose prompt is being computed here."""
        self._meter = StepMeter(metrics, draft_length=identity.draft_length)
        follow_engine(metrics.engine, self.engine, self.room)
        follow_requests(
            metrics,
            reservations=self.reservations,
            quarantine=self.quarantine,
            num_uncomputed=self._num_uncomputed,
        )

    async def reserve(
        self,
        request_id: RequestId,
        epoch: int,
        *,
        num_tokens: int,
        max_length: int,
        model_fingerprint: str,
    ) -> Reservation:
        """Set room aside before any prefill work; an older epoch of the request is ended first.

        Raises Draining, ContractMismatch, ContextLengthExceeded, CapacityExhausted and what `Reservations.reserve` does.
        """
        if self.is_draining:
            raise Draining("this decode worker is draining")
        if self.engine.has_crashed:
            raise WorkerLost("the engine of this decode worker has failed")
        require_servable(self.identity, max_length=max_length, model_fingerprint=model_fingerprint)
        older = self.reservations.find(request_id)
        if older is not None and older.epoch < epoch:
            self.end(older, RequestAborted(f"request {request_id!r} was placed again"))
            try:
                async with asyncio.timeout(END_TIMEOUT_S):
                    await older.left.wait()
            except TimeoutError:
                raise WorkerLost(
                    f"epoch {older.epoch} of request {request_id!r} does not end"
                ) from None
        return self.reservations.reserve(
            request_id, epoch, num_tokens=num_tokens, max_length=max_length
        )

    def admit(
        self,
        outbox: Outbox,
        context: RequestContext,
        reservation_id: str,
        capability: bytes,
        traceparent: str = "",
    ) -> None:
        """Run a request as soon as its state is there. What is wrong is told to the outbox as Failed."""
        try:
            reservation = self.reservations.authorize(
                context.request_id, context.epoch, reservation_id, capability
            )
            known = self._admissions.get(reservation_id)
            if known is not None:
                _require_same_stream(known, outbox)
                return
        except ServingError as error:
            outbox.put(Failed(request_id=context.request_id, epoch=context.epoch, error=error))
            return
        computes_prompt = (
            reservation.state is ReservationState.RESERVED and self.identity.computes_prompts
        )
        self._admissions[reservation_id] = Admission(
            context=context,
            outbox=outbox,
            rounds=UncommittedRounds(context.length),
            trace=RequestTrace(self._tracing.join("decode", traceparent=traceparent), context),
        )
        self.reservations.touch(reservation)
        try:
            require_agreement(context, reservation)
            if computes_prompt:
                self._run(reservation, prompt_request(context, reservation))
            elif reservation.state is ReservationState.READY:
                self._run_handed_over(reservation)
        except ServingError as error:
            self.end(reservation, error)

    def commit(self, outbox: Outbox, request_id: RequestId, epoch: int, order: CommitOrder) -> None:
        """The router accepts tokens, or ends the request at a length. Unknown requests and epochs are ignored."""
        reservation = self._of_stream(outbox, request_id, epoch)
        if reservation is None:
            return
        admission = self._admissions[reservation.reservation_id]
        if reservation.state is not ReservationState.RUNNING:
            if order.finish:
                self.end(reservation, None)
            return
        try:
            is_news = admission.rounds.accept(order)
        except InvalidRequest as error:
            self.end(reservation, error)
            return
        if order.finish:
            self.end(reservation, None)
        elif is_news:
            self.engine.commit(request_id, order.round)

    def abort(self, outbox: Outbox, request_id: RequestId, epoch: int, reservation_id: str) -> None:
        """End a request whatever its state. Unknown ones are ignored."""
        reservation = self.reservations.by_id(reservation_id) or self.reservations.find(request_id)
        if (
            reservation is None
            or reservation.has_ended
            or (reservation.request_id, reservation.epoch) != (request_id, epoch)
        ):
            return
        is_heard = reservation.reservation_id in self._admissions
        self.end(reservation, None)
        if not is_heard:
            # It was never admitted, so its memory is free already and nobody else is told.
            outbox.put(Finished(request_id=request_id, epoch=epoch))

    def stream_ended(self, outbox: Outbox) -> None:
        """A router has gone; its requests go with it."""
        outbox.close()
        for reservation_id, admission in list(self._admissions.items()):
            reservation = self.reservations.by_id(reservation_id)
            if admission.outbox is outbox and reservation is not None:
                self.end(reservation, RequestAborted("the router's stream ended"))

    def expire(self) -> None:
        """End reservations that no router has asked to run. Called every second or so.

        Once admitted, a request is its router's, whose deadline and whose stream's end bound it.
        """
        for reservation in self.reservations.expired():
            if reservation.reservation_id in self._admissions:
                continue
            self.metrics.engine.reservations_expired.inc()
            logger.warning(
                "reservation %s of request %s expired while %s",
                reservation.reservation_id,
                reservation.request_id,
                reservation.state.value,
            )
            self.end(reservation, TransferFailed("the reservation expired: no router admitted it"))

    def end(self, reservation: Reservation, error: ServingError | None) -> None:
        """End a request in any state, once: stop it, free its memory, then tell its router. None is an end as told.

        Memory that its sender may still write to is not freed but put into quarantine.
        """
        if reservation.has_ended:
            return
        is_running = reservation.state is ReservationState.RUNNING
        reservation.move(ReservationState.ABORTING)
        writer = self.intake.forget(reservation)
        if writer is not None:
            self.quarantine.hold(reservation, writer)
            self._tell_router(reservation, error)
        elif is_running:
            self._count_end(reservation)
            # The engine may be in the middle of a step that writes these pages.
            ending = asyncio.create_task(self._release_running(reservation, error))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
        else:
            self._release(reservation, error)

    async def tend(self) -> None:
        """End what is overdue and ask after writes that did not stop; called about every second."""
        self.expire()
        await self.quarantine.ask_all()

    def begin_draining(self) -> None:
        """Take nothing new."""
        self.is_draining = True
        logger.info("draining %d requests", len(self.reservations))

    async def wait_idle(self) -> None:
        """Return once nothing is reserved. The caller sets the deadline."""
        await self.reservations.wait_empty()

    async def close(self) -> None:
        """Take nothing new, end what is left and stop the engine."""
        self.is_draining = True
        for reservation in self.reservations.all():
            self.end(reservation, WorkerLost("the decode worker stops"))
        if self._endings:
            await asyncio.wait(tuple(self._endings))
        await self.quarantine.close()
        await self._senders.close()
        await self.engine.stop()
        await self._engines.close()

    def _on_ready(self, reservation: Reservation) -> None:
        """A hand-off is complete."""
        if reservation.reservation_id in self._admissions:
            try:
                self._run_handed_over(reservation)
            except ServingError as error:
                self.end(reservation, error)

    def _on_step(self, report: StepReport) -> None:
        """The engine made a step: offer every round to its router."""
        for result in report.rounds:
            reservation = self._running.get(result.request.request_id)
            if reservation is None or reservation.has_ended:
                self.metrics.engine.tokens_discarded.inc(len(result.token_ids))
                continue  # it was ended while the step ran
            self._num_uncomputed.pop(reservation.request_id, None)
            admission = self._admissions[reservation.reservation_id]
            admission.rounds.offer(result)
            admission.trace.round(result)
            admission.outbox.put(
                Verified(request_id=reservation.request_id, epoch=reservation.epoch, result=result)
            )
        self._meter.count(report)

    def _on_crash(self, error: Exception) -> None:
        """The engine is gone and every request with it."""
        for reservation in list(self._running.values()):
            self.end(reservation, WorkerLost("the engine of the decode worker failed"))

    def _count_end(self, reservation: Reservation) -> None:
        """A request that ran is over: what it was offered and did not take is lost."""
        self._num_uncomputed.pop(reservation.request_id, None)
        rounds = self._admissions[reservation.reservation_id].rounds
        self.metrics.engine.tokens_discarded.inc(rounds.num_uncommitted)

    async def _release_running(self, reservation: Reservation, error: ServingError | None) -> None:
        await self.engine.remove(reservation.request_id)
        del self._running[reservation.request_id]
        self._release(reservation, error)

    def _release(self, reservation: Reservation, error: ServingError | None) -> None:
        self.reservations.release(reservation)
        self._tell_router(reservation, error)

    def _tell_router(self, reservation: Reservation, error: ServingError | None) -> None:
        admission = self._admissions.pop(reservation.reservation_id, None)
        if admission is not None:
            admission.outbox.put(_last_event(reservation, error))
            admission.trace.ended(error)
            _log_end(reservation, admission, error)

    def _of_stream(self, outbox: Outbox, request_id: RequestId, epoch: int) -> Reservation | None:
        reservation = self.reservations.find(request_id)
        if reservation is None or reservation.epoch != epoch or reservation.has_ended:
            return None
        admission = self._admissions.get(reservation.reservation_id)
        return reservation if admission is not None and admission.outbox is outbox else None

    def _run_handed_over(self, reservation: Reservation) -> None:
        result = self.intake.result_of(reservation)
        context = self._admissions[reservation.reservation_id].context
        request = adopted_request(
            context,
            reservation,
            result,
            num_computed=self.intake.num_received(reservation),
            draft_length=self.identity.draft_length,
        )
        fallback = ""
        if not result.has_drafter_state and self.identity.draft_length:
            fallback = "the prefill worker sent no drafter state"
            self.metrics.spec_decode.drafter_fallbacks.inc()
        # What was committed since the state was computed begins with its first token.
        is_news = len(request.tokens) > context.length
        self._run(
            reservation,
            request,
            transfer_engine=self.intake.engine_of(reservation),
            drafter_fallback=fallback,
            first=result if is_news else None,
        )

    def _run(
        self,
        reservation: Reservation,
        request: Request,
        *,
        transfer_engine: str = "",
        drafter_fallback: str = "",
        first: HandoffResult | None = None,
    ) -> None:
        self.engine.add(request)
        reservation.move(ReservationState.RUNNING)
        self._running[request.request_id] = reservation
        self.metrics.engine.queue_duration.observe(self._clock() - reservation.reserved_at)
        if request.computes_prompt:
            self._num_uncomputed[request.request_id] = request.num_uncomputed
        admission = self._admissions[reservation.reservation_id]
        admission.rounds = UncommittedRounds(len(request.tokens))
        admission.trace.runs(transfer_engine=transfer_engine)
        admission.outbox.put(
            Admitted(
                request_id=request.request_id,
                epoch=request.epoch,
                first_token_id=first.first_token_id if first else None,
                first_logprob=first.first_logprob if first else None,
                drafter_fallback=drafter_fallback,
                transfer_engine=transfer_engine,
            )
        )


def _require_same_stream(known: Admission, outbox: Outbox) -> None:
    if known.outbox is not outbox:
        raise DuplicateRequest(
            f"request {known.context.request_id!r} was admitted by another stream"
        )


def _last_event(reservation: Reservation, error: ServingError | None) -> Event:
    if error is None:
        return Finished(request_id=reservation.request_id, epoch=reservation.epoch)
    return Failed(request_id=reservation.request_id, epoch=reservation.epoch, error=error)


def _log_end(reservation: Reservation, admission: Admission, error: ServingError | None) -> None:
    logger.debug(
        "request ended",
        extra={
            "request_id": reservation.request_id,
            "epoch": reservation.epoch,
            "rounds": admission.rounds.last_round,
            "committed_length": admission.rounds.committed_length,
            "outcome": "finished" if error is None else error.reason,
            **({"cause": error.message} if error is not None else {}),
            **admission.trace.ids(),
        },
    )
