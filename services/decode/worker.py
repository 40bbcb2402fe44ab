"""The decode worker's requests from reservation to release. Knows who may ask what of them; no messages and no tensors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from common.engine.crossing import Steps
from common.engine.memory import Memory
from common.engine.meter import StepMeter, follow_engine
from common.engine.request import StepReport
from common.engine.thread import EngineThread
from common.errors import (
    Draining,
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
from common.transfer.handoff import CacheContract
from common.transfer.memory import PoolMemory
from common.types import RequestContext, RequestId
from services.decode.admissions import Admission, Admissions
from services.decode.commits import CommitOrder, Outbox, UncommittedRounds
from services.decode.endings import Endings
from services.decode.events import Failed, Finished
from services.decode.gauges import follow_requests
from services.decode.intake import Intake
from services.decode.loop import run_decode_loop
from services.decode.meetings import Meetings
from services.decode.quarantine import Quarantine
from services.decode.requests import (
    prompt_request,
    require_agreement,
    require_servable,
)
from services.decode.reservations import Reservation, Reservations, ReservationState
from services.decode.runs import Runs
from services.decode.senders import Senders
from services.decode.trace import RequestTrace

logger = logging.getLogger(__name__)


class DecodeWorker:
    """Everything that routers and prefill workers ask of a decode worker. Lives on the event loop."""

    def __init__(
        self,
        engine: Steps,
        *,
        identity: WorkerIdentity,
        drafter_fingerprint: str,
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
            num_groups=identity.mesh.dp,
        )
        self.reservations = Reservations(self.room, lifetime_s=reservation_s, clock=clock)
        self.meetings = Meetings(
            memory=memory,
            contract=CacheContract(
                model_fingerprint=identity.model_fingerprint,
                layout=memory.layout,
                drafter_fingerprint=drafter_fingerprint,
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
        self._admissions = Admissions()
        self._runs = Runs(
            engine=self.engine,
            intake=self.intake,
            admissions=self._admissions,
            metrics=metrics,
            draft_length=identity.draft_length,
            clock=clock,
        )
        self._endings = Endings(
            reservations=self.reservations,
            intake=self.intake,
            quarantine=self.quarantine,
            runs=self._runs,
            admissions=self._admissions,
        )
        self._meter = StepMeter(metrics, draft_length=identity.draft_length)
        follow_engine(metrics.engine, self.engine, self.room)
        follow_requests(
            metrics,
            reservations=self.reservations,
            quarantine=self.quarantine,
            num_uncomputed=self._runs.num_uncomputed,
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
        await self._endings.end_older(request_id, epoch)
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
            if self._admissions.is_known(reservation, outbox):
                return
        except ServingError as error:
            self.metrics.transfer.count_refusal(error)
            outbox.put(Failed(request_id=context.request_id, epoch=context.epoch, error=error))
            return
        computes_prompt = (
            reservation.state is ReservationState.RESERVED and self.identity.computes_prompts
        )
        admission = Admission(
            reservation=reservation,
            context=context,
            outbox=outbox,
            rounds=UncommittedRounds(context.length),
            trace=RequestTrace(self._tracing.join("decode", traceparent=traceparent), context),
        )
        self._admissions.add(admission)
        self.reservations.touch(reservation)
        try:
            require_agreement(context, reservation)
            if computes_prompt:
                self._runs.begin(reservation, prompt_request(context, reservation))
            elif reservation.state is ReservationState.READY:
                self._runs.begin_handed_over(reservation)
        except ServingError as error:
            self.end(reservation, error)

    def commit(self, outbox: Outbox, request_id: RequestId, epoch: int, order: CommitOrder) -> None:
        """The router accepts tokens, or ends the request at a length. Unknown requests and epochs are ignored."""
        reservation = self.reservations.find(request_id)
        if reservation is None or reservation.epoch != epoch or reservation.has_ended:
            return
        admission = self._admissions.of_stream(outbox, reservation)
        if admission is None:
            return
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
        is_heard = reservation in self._admissions
        self.end(reservation, None)
        if not is_heard:
            # It was never admitted, so its memory is free already and nobody else is told.
            outbox.put(Finished(request_id=request_id, epoch=epoch))

    def stream_ended(self, outbox: Outbox) -> None:
        """A router has gone; its requests go with it."""
        outbox.close()
        for admission in self._admissions.all_of_stream(outbox):
            self.end(admission.reservation, RequestAborted("the router's stream ended"))

    def expire(self) -> None:
        """End reservations that no router has asked to run. Called every second or so.

        Once admitted, a request is its router's, whose deadline and whose stream's end bound it.
        """
        for reservation in self.reservations.expired():
            if reservation in self._admissions:
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
        """End a request in any state, once; None is an end as told."""
        self._endings.end(reservation, error)

    async def tend(self) -> None:
        """End what is overdue and ask after writes that did not stop; called about every second."""
        self.expire()
        await self.quarantine.ask_all()

    def begin_draining(self) -> None:
        """Take nothing new."""
        self.is_draining = True
        logger.info("draining %d requests", len(self.reservations))

    @property
    def is_safe_to_delete(self) -> bool:
        """Whether it drains and no memory is held any more, quarantine included."""
        return self.is_draining and self.reservations.is_empty

    async def wait_idle(self) -> None:
        """Return once no memory is held. The caller sets the deadline."""
        await self.reservations.wait_empty()

    async def close(self) -> None:
        """Take nothing new, end what is left and stop the engine."""
        self.is_draining = True
        for reservation in self.reservations.all():
            self.end(reservation, WorkerLost("the decode worker stops"))
        ended = asyncio.ensure_future(self._endings.wait())
        await self.engine.stop(after=ended)
        await ended
        await self.quarantine.close()
        await self._senders.close()
        await self._engines.close()

    def _on_ready(self, reservation: Reservation) -> None:
        """A hand-off is complete."""
        if reservation in self._admissions:
            try:
                self._runs.begin_handed_over(reservation)
            except ServingError as error:
                self.end(reservation, error)

    def _on_step(self, report: StepReport) -> None:
        self._runs.offer(report)
        self._meter.count(report)

    def _on_crash(self, error: Exception) -> None:
        """The engine is gone and every request with it."""
        for reservation in self._runs.all():
            self.end(reservation, WorkerLost("the engine of the decode worker failed"))
