"""The requests that the engine runs, from what makes them run to what they come to. Knows rounds; not who commits them."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.request import Request, StepReport
from common.engine.thread import EngineThread
from common.telemetry.metrics import WorkerMetrics
from common.transfer.handoff import HandoffResult
from common.types import RequestId
from services.decode.admissions import Admissions
from services.decode.commits import UncommittedRounds
from services.decode.events import Admitted, Verified
from services.decode.intake import Intake
from services.decode.requests import adopted_request
from services.decode.reservations import Reservation, ReservationState


class Runs:
    """All reservations of a worker that are RUNNING, or that have ended and whose last step is waited for."""

    def __init__(
        self,
        *,
        engine: EngineThread[StepReport],
        intake: Intake,
        admissions: Admissions,
        metrics: WorkerMetrics,
        draft_length: int,
        clock: Callable[[], float],
    ) -> None:
        self.num_uncomputed: dict[RequestId, int] = {}
        """Prompt tokens of requests whose prompt is being computed here."""
        self._engine = engine
        self._intake = intake
        self._admissions = admissions
        self._metrics = metrics
        self._draft_length = draft_length
        self._clock = clock
        self._running: dict[RequestId, Reservation] = {}

    def all(self) -> list[Reservation]:
        return list(self._running.values())

    def begin_handed_over(self, reservation: Reservation) -> None:
        """Run a reservation that is READY and admitted. Raises what the request's own checks do."""
        result = self._intake.result_of(reservation)
        context = self._admissions[reservation].context
        request = adopted_request(
            context,
            reservation,
            result,
            num_computed=self._intake.num_received(reservation),
            draft_length=self._draft_length,
        )
        fallback = ""
        if not result.has_drafter_state and self._draft_length:
            why = self._intake.drafter_difference(reservation)
            fallback = "the prefill worker sent no drafter state" + (f": {why}" if why else "")
            self._metrics.spec_decode.drafter_fallbacks.inc()
        # What was committed since the state was computed begins with its first token.
        is_news = len(request.tokens) > context.length
        self.begin(
            reservation,
            request,
            transfer_engine=self._intake.engine_of(reservation),
            drafter_fallback=fallback,
            first=result if is_news else None,
        )

    def begin(
        self,
        reservation: Reservation,
        request: Request,
        *,
        transfer_engine: str = "",
        drafter_fallback: str = "",
        first: HandoffResult | None = None,
    ) -> None:
        """Run an admitted reservation. `first` has the first token when it is news to the router."""
        self._engine.add(request)
        reservation.move(ReservationState.RUNNING)
        self._running[request.request_id] = reservation
        self._metrics.engine.queue_duration.observe(self._clock() - reservation.reserved_at)
        if request.computes_prompt:
            self.num_uncomputed[request.request_id] = request.num_uncomputed
        admission = self._admissions[reservation]
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

    def offer(self, report: StepReport) -> None:
        """The engine made a step: offer every round to its router."""
        for result in report.rounds:
            reservation = self._running.get(result.request.request_id)
            if reservation is None or reservation.has_ended:
                self._metrics.engine.tokens_discarded.inc(len(result.token_ids))
                continue  # it was ended while the step ran
            self.num_uncomputed.pop(reservation.request_id, None)
            admission = self._admissions[reservation]
            admission.rounds.offer(result)
            admission.trace.round(result)
            admission.outbox.put(
                Verified(request_id=reservation.request_id, epoch=reservation.epoch, result=result)
            )

    def count_end(self, reservation: Reservation) -> None:
        """A request that ran is over: what it was offered and did not take is lost."""
        self.num_uncomputed.pop(reservation.request_id, None)
        rounds = self._admissions[reservation].rounds
        self._metrics.engine.tokens_discarded.inc(rounds.num_uncommitted)

    async def remove(self, reservation: Reservation) -> None:
        """Return when the engine has let go of a request: it may be in the middle of a step that writes its pages.

        Bounded by that step alone; whoever wants the request gone, `Endings.end_older`, has a deadline of its own.
        """
        await self._engine.remove(reservation.request_id)
        del self._running[reservation.request_id]
