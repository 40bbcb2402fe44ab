"""The prefill worker's requests from arrival to lease. Knows jobs and room; no messages and no tensors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from common.engine.memory import Memory, RequestMemory
from common.engine.request import Request, Role
from common.engine.thread import EngineThread, Steps
from common.errors import (
    ContextLengthExceeded,
    Draining,
    DuplicateRequest,
    InvalidRequest,
    RequestAborted,
    RequestNotFound,
    ServingError,
    WorkerLost,
)
from common.rpc.worker_info import WorkerIdentity
from common.transfer.handoff import HandoffKey
from common.types import RequestContext, RequestId
from services.prefill.events import HandoffDone
from services.prefill.handoff import DecodeTicket, Handoff, Sender
from services.prefill.job import Job
from services.prefill.leases import Leases
from services.prefill.loop import PrefillReport, run_prefill_loop
from services.prefill.peers import Peers
from services.prefill.room import Room

logger = logging.getLogger(__name__)


class PrefillWorker:
    """Everything that routers ask of a prefill worker. Lives on the event loop."""

    def __init__(
        self,
        engine: Steps,
        *,
        identity: WorkerIdentity,
        sender: Sender,
        peers: Peers,
        max_queued: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self.leases = Leases(lease_s=sender.config.lease_s, clock=clock)
        self.room = Room(
            Memory(num_pages=identity.num_pages, num_slots=identity.num_slots),
            self.leases,
            max_queued=max_queued,
        )
        self.engine = EngineThread(
            engine, run_prefill_loop, on_report=self._on_report, on_crash=self._on_crash
        )
        self.is_draining = False
        self._sender = sender
        self._peers = peers
        self._clock = clock
        self._jobs: dict[RequestId, Job] = {}

    @property
    def num_jobs(self) -> int:
        """Requests that wait, compute or hand over."""
        return len(self._jobs)

    async def prefill(self, context: RequestContext, ticket: DecodeTicket) -> Job:
        """Begin a prefill; an older epoch of the request is ended first. Whoever stops listening cancels the job.

        Raises Draining, InvalidRequest, ContextLengthExceeded, and DuplicateRequest or RequestNotFound when the
        request is here in this or a newer epoch.
        """
        job = Job(context, ticket, arrived_at=self._clock())
        self._require_possible(context)
        self._peers.channel(ticket.address)
        while (known := self._jobs.get(context.request_id)) is not None:
            _require_older(known, context)
            known.cancel(RequestAborted("the request was placed again"))
            await known.freed.wait()
        if self.is_draining:
            raise Draining("this prefill worker is draining")
        self._jobs[context.request_id] = job
        job.start(self._run(job))
        return job

    def release_lease(self, lease_id: str) -> bool:
        """Free a finished request's state; False when its lease had ended."""
        was_found = self.leases.release(lease_id)
        self.room.serve_queue()
        return was_found

    def expire(self) -> None:
        """End overdue leases. Called every second or so."""
        if self.leases.expire():
            self.room.serve_queue()

    async def wait_idle(self) -> None:
        """Return once no job is left. The caller sets the deadline."""
        while self._jobs:
            await next(iter(self._jobs.values())).freed.wait()

    async def close(self) -> None:
        """Take nothing new, end what is left and stop the engine."""
        self.is_draining = True
        jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel(WorkerLost("the prefill worker stops"))
        await asyncio.gather(*(job.wait_ended() for job in jobs))
        await self.engine.stop()
        for engine in self._sender.engines.values():
            await engine.close()
        await self._peers.close()

    async def _run(self, job: Job) -> None:
        try:
            memory = await self.room.acquire(self._max_length(job.context))
            await self._run_in(memory, job)
        finally:
            self._forget(job)

    async def _run_in(self, memory: RequestMemory, job: Job) -> None:
        """Compute and hand over; ends with a lease or with everything given back."""
        handoff = self._handoff(job, memory)
        why, is_kept = "cancelled", False
        try:
            self.engine.add(self._request(job.context, memory))
            await self._hand_over(job, handoff)
            self._keep(job, handoff, memory)
            is_kept = True
        except ServingError as error:
            why = error.message
            raise
        finally:
            job.is_ending = True
            if not is_kept:
                await self._give_up(job, handoff, memory, why)

    async def _hand_over(self, job: Job, handoff: Handoff) -> None:
        """Send pages as they close while the engine computes the next ones, then everything else."""
        await handoff.negotiate()
        while job.first is None:
            await job.wait_progress()
            await handoff.send_closed(job.num_computed)
        await handoff.finish(job.first)

    def _keep(self, job: Job, handoff: Handoff, memory: RequestMemory) -> None:
        assert job.first is not None
        lease = self.leases.grant(memory)
        handoff_s = self._clock() - job.first.sampled_at
        job.put(
            HandoffDone(
                lease_id=lease.lease_id,
                lease_s=self.leases.lease_s,
                num_bytes=handoff.num_bytes,
                handoff_s=handoff_s,
                transfer_engine=handoff.engine_name,
            )
        )
        self.room.serve_queue()
        logger.info(
            "request %s epoch %d: %d tokens handed to %s, %d bytes by %s, %.1f ms after its first token",
            job.context.request_id,
            job.context.epoch,
            job.context.length,
            job.ticket.address,
            handoff.num_bytes,
            handoff.engine_name,
            handoff_s * 1e3,
        )

    async def _give_up(self, job: Job, handoff: Handoff, memory: RequestMemory, why: str) -> None:
        """Stop computing and sending, free the room, tell the decode worker: in this order."""
        await self.engine.remove(job.context.request_id)
        await handoff.stop()
        self.room.release(memory)
        self._forget(job)
        logger.info(
            "request %s epoch %d given up: %s", job.context.request_id, job.context.epoch, why
        )
        await handoff.abort(why)

    def _forget(self, job: Job) -> None:
        if self._jobs.get(job.context.request_id) is job:
            del self._jobs[job.context.request_id]
        job.freed.set()

    def _on_report(self, reports: PrefillReport) -> None:
        for report in reports:
            job = self._jobs.get(report.request_id)
            if job is not None and job.context.epoch == report.epoch:
                job.progressed(report)

    def _on_crash(self, error: Exception) -> None:
        for job in list(self._jobs.values()):
            job.cancel(WorkerLost("the engine of the prefill worker failed"))

    def _require_possible(self, context: RequestContext) -> None:
        if self.engine.has_crashed:
            raise WorkerLost("the engine of this prefill worker has failed")
        if not 0 < context.length < context.max_length:
            raise InvalidRequest(
                f"a context of {context.length} tokens that may reach {context.max_length} leaves nothing to compute"
            )
        if context.max_length > self.identity.max_context_length:
            raise ContextLengthExceeded(
                f"the request may reach {context.max_length} tokens; "
                f"this worker takes {self.identity.max_context_length}",
                metadata={"limit": str(self.identity.max_context_length)},
            )

    def _max_length(self, context: RequestContext) -> int:
        """Room for the prompt, the first token and a proposal behind it; the rest is the decode worker's affair."""
        return min(context.max_length, context.length + 1 + self.identity.draft_length + 1)

    def _request(self, context: RequestContext, memory: RequestMemory) -> Request:
        return Request(
            request_id=context.request_id,
            epoch=context.epoch,
            role=Role.UNTIL_FIRST_TOKEN,
            tokens=context.tokens,
            max_length=self._max_length(context),
            sampling=context.sampling,
            slot=memory.slot,
            block_table=memory.block_table,
        )

    def _handoff(self, job: Job, memory: RequestMemory) -> Handoff:
        context, ticket = job.context, job.ticket
        key = HandoffKey(
            request_id=context.request_id,
            epoch=context.epoch,
            reservation_id=ticket.reservation_id,
            prefill_generation=self.identity.generation,
        )
        return Handoff(
            self._sender,
            key,
            ticket,
            self._peers.handoff_stub(ticket.address),
            source=self._sender.memory.placement(
                page_ids=tuple(memory.block_table), slot=memory.slot
            ),
            num_tokens=context.length,
        )


def _require_older(known: Job, context: RequestContext) -> None:
    if context.epoch < known.context.epoch:
        raise RequestNotFound(
            f"request {context.request_id!r} is in epoch {known.context.epoch}, not {context.epoch}"
        )
    if context.epoch == known.context.epoch:
        raise DuplicateRequest(f"request {context.request_id!r} is computed here already")
