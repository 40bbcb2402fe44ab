"""From a context to two workers that run it. Knows reservations and legs; never decides what is committed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc.aio

from common.errors import (
    CapacityExhausted,
    DeadlinePassed,
    Draining,
    NoReadyWorkers,
    ServingError,
    WorkerLost,
)
from common.rpc import convert
from common.rpc.status import error_of_call
from common.telemetry.tracing import current
from common.types import RequestContext
from dspark.v1 import decode_service_pb2, prefill_service_pb2, types_pb2
from services.router.admission import AdmissionQueue
from services.router.attempt import Attempt
from services.router.config import RouterConfig
from services.router.contexts import LiveRequest
from services.router.decode_link import abort_command
from services.router.decode_worker import DecodeWorker
from services.router.events import Event, Failed
from services.router.leases import Lease, Leases
from services.router.prefill_leg import run_handoff, run_prefill
from services.router.prefill_worker import PrefillWorker
from services.router.replacement import is_workers_fault
from services.router.trace_stages import Stage
from services.router.worker import OnLost, Worker
from services.router.workers import WorkerDirectory, no_ready_workers

Reservation = decode_service_pb2.ReserveResponse

_MAY_PASS = (CapacityExhausted, Draining, NoReadyWorkers, WorkerLost)
"""Refusals that are worth waiting for room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a context will run."""

    decode: DecodeWorker
    reservation: Reservation
    prefill: PrefillWorker | None
    """None when decode computes the prompt."""
    lease: Lease | None
    """State that `prefill` hands over instead of computing it."""


class Placer:
    """Finds places for contexts and starts them there."""

    def __init__(
        self,
        config: RouterConfig,
        workers: WorkerDirectory,
        queue: AdmissionQueue,
        leases: Leases,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._workers = workers
        self._queue = queue
        self._leases = leases
        self._clock = clock

    @contextlib.asynccontextmanager
    async def placed(self, live: LiveRequest, deadline: float) -> AsyncIterator[Attempt]:
        """The request's context, running on workers until the block ends; both legs are ended with it.

        A request that was placed before waits no turn. Raises QueueFull, CapacityExhausted, NoReadyWorkers or
        DeadlinePassed when there is no place in time.
        """
        if live.num_replacements == 0:
            async with self._queue.turn(deadline):
                place = await self._find_place(live)
        else:
            place = await self._find_place(live)
        try:
            async with self._started(live.context, place, deadline) as attempt:
                yield attempt
        finally:
            if place.prefill is not None and place.lease is None:
                # Prefill names a lease after the reservation.
                self._leases.release_unheard(place.prefill, place.reservation.reservation_id)

    async def _find_place(self, live: LiveRequest) -> Place:
        """Try all decode workers, and again whenever there may be room, until the queue's timeout."""
        refusal: ServingError = CapacityExhausted("no worker had room in time")
        try:
            async with asyncio.timeout(self._config.queue.queue_timeout_s):
                while True:
                    try:
                        return await self._try_place(live)
                    except _MAY_PASS as error:
                        # Nobody waits long for a system that is not there; a request that was running does,
                        # because its worker may be coming back.
                        if live.num_replacements == 0 and not self._workers.is_ready:
                            raise
                        refusal = error
                    live.stages.enter(Stage.QUEUE)
                    await self._queue.room()
        except TimeoutError:
            refusal.retry_after_s = self._queue.retry_after_s()
            raise refusal from None

    async def _try_place(self, live: LiveRequest) -> Place:
        """One round over all decode workers. Raises the last refusal, of those that may pass if there are any."""
        blame = live.failures.blame
        lease = live.lease if live.lease is not None and live.lease.is_usable else None
        refusals: list[ServingError] = [no_ready_workers("decode")]
        prefills = [lease.worker] if lease else self._workers.ranked_prefill(blame)
        for decode in self._workers.ranked_decode(blame, prefills=prefills):
            if not (decode.computes_prompts or lease or self._workers.ranked_prefill(blame)):
                refusals.append(no_ready_workers("prefill"))
                continue
            try:
                # Counted from here on, or requests that come together would all choose the same worker.
                live.stages.enter(Stage.RESERVE)
                with decode.carrying(_num_left(live.context)):
                    reservation = await self._reserve(decode, live.context)
            except ServingError as error:
                if not is_workers_fault(error) and not isinstance(error, CapacityExhausted):
                    raise
                refusals.append(error)
                continue
            if reservation.computes_prompt:
                return Place(decode=decode, reservation=reservation, prefill=None, lease=None)
            kept = lease if lease and self._can_be_brought(lease, decode) else None
            ready = [kept.worker] if kept else self._ranked_prefill(live, decode)
            if ready:
                return Place(decode=decode, reservation=reservation, prefill=ready[0], lease=kept)
            _give_back(decode, live.context, reservation)
            refusals.append(no_ready_workers("prefill"))
        raise next((r for r in reversed(refusals[1:]) if isinstance(r, _MAY_PASS)), refusals[-1])

    def _can_be_brought(self, lease: Lease, decode: DecodeWorker) -> bool:
        """Whether to hand over what a lease keeps; not from a worker that could not meet `decode` when another may."""
        could_not_meet = self._workers.could_not_meet
        return not could_not_meet(lease.worker, decode) or all(
            could_not_meet(prefill, decode) for prefill in self._workers.ranked_prefill()
        )

    def _ranked_prefill(self, live: LiveRequest, decode: DecodeWorker) -> list[PrefillWorker]:
        """Those last that have failed to hand this request over to `decode`, and before them those that could not meet it."""
        failures, workers = live.failures, self._workers
        return sorted(
            workers.ranked_prefill(failures.blame),
            key=lambda prefill: (
                failures.was_between(prefill.address, decode.address),
                workers.could_not_meet(prefill, decode),
            ),
        )

    async def _reserve(self, decode: DecodeWorker, context: RequestContext) -> Reservation:
        """Room on one worker. A reservation that comes after the request was cancelled is given back."""
        request = decode_service_pb2.ReserveRequest(
            request_id=context.request_id,
            epoch=context.epoch,
            num_tokens=context.length,
            max_length=context.max_length,
            model_fingerprint=self._workers.model().fingerprint,
        )
        timeout_s = self._config.workers.reserve_timeout_s
        reserving = asyncio.ensure_future(_reserved(decode, request, timeout_s))
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:
            reserving.add_done_callback(lambda done: _give_back_if_reserved(decode, context, done))
            raise

    @contextlib.asynccontextmanager
    async def _started(
        self, context: RequestContext, place: Place, deadline: float
    ) -> AsyncIterator[Attempt]:
        """Admit on decode, so that it listens; then prefill, unless decode does that itself."""
        decode, prefill, reservation = place.decode, place.prefill, place.reservation
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        context_pb = convert.context_to_pb(context)
        admit = decode_service_pb2.Admit(
            request_id=context.request_id,
            epoch=context.epoch,
            reservation_id=reservation.reservation_id,
            capability=reservation.capability,
            context=context_pb,
            traceparent=span.traceparent if (span := current()) else "",
        )
        async with contextlib.AsyncExitStack() as stack:
            on_lost = _reporter(inbox, decode)
            stack.enter_context(decode.carrying(_num_left(context), on_lost))
            session = decode.link.admit(admit, inbox)
            stack.callback(session.close)
            if prefill is not None:
                left_s = max(0.0, deadline - self._clock())
                leg = asyncio.create_task(_bring_state(place, prefill, context_pb, inbox, left_s))
                # A prefill worker is done with the request long before decode is.
                prefilling = stack.enter_context(contextlib.ExitStack())
                on_lost = _reporter(inbox, prefill)
                num_tokens = 0 if place.lease else context.length
                prefilling.enter_context(prefill.carrying(num_tokens, on_lost))
                leg.add_done_callback(lambda _: prefilling.close())
                stack.push_async_callback(_cancelled, leg)
            yield Attempt(
                inbox,
                session,
                decode=decode,
                prefill=prefill,
                is_from_lease=place.lease is not None,
            )


async def _bring_state(
    place: Place,
    prefill: PrefillWorker,
    context: types_pb2.RequestContext,
    inbox: asyncio.Queue[Event],
    timeout_s: float,
) -> None:
    """Have the context's state computed, or what a lease keeps of it, and handed to decode."""
    ticket = _ticket(place.decode, place.reservation)
    if place.lease is None:
        prefill_request = prefill_service_pb2.PrefillRequest(context=context, ticket=ticket)
        await run_prefill(prefill, prefill_request, inbox, timeout_s)
    else:
        handoff_request = prefill_service_pb2.HandOffRequest(
            lease_id=place.lease.lease_id, context=context, ticket=ticket
        )
        await run_handoff(prefill, handoff_request, inbox, timeout_s)


def _num_left(context: RequestContext) -> int:
    """Tokens that the request may still generate."""
    return context.max_length - context.length


async def _reserved(
    decode: DecodeWorker, request: decode_service_pb2.ReserveRequest, timeout_s: float
) -> Reservation:
    try:
        return await decode.stub.Reserve(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        known = error_of_call(error, peer=decode.address)
        raise WorkerLost(known.message) if isinstance(known, DeadlinePassed) else known from None


def _give_back_if_reserved(
    decode: DecodeWorker, context: RequestContext, reserving: asyncio.Future[Reservation]
) -> None:
    if not reserving.cancelled() and reserving.exception() is None:
        _give_back(decode, context, reserving.result())


def _give_back(decode: DecodeWorker, context: RequestContext, reservation: Reservation) -> None:
    decode.link.send(abort_command(context.request_id, context.epoch, reservation.reservation_id))


def _ticket(decode: DecodeWorker, reservation: Reservation) -> prefill_service_pb2.DecodeTicket:
    return prefill_service_pb2.DecodeTicket(
        decode_address=decode.address,
        reservation_id=reservation.reservation_id,
        capability=reservation.capability,
    )


def _reporter(inbox: asyncio.Queue[Event], worker: Worker) -> OnLost:
    """Puts the loss of a worker among its request's events."""
    return lambda error: inbox.put_nowait(
        Failed(error=error, worker=worker.address, role=worker.role)
    )


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a leg and wait until its call is gone."""
    task.cancel()
    await asyncio.wait((task,))
