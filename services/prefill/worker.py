"""The prefill worker's requests from their arrival to their end. Knows jobs, leases and room; no messages and no tensors."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from common.engine.crossing import Steps
from common.engine.memory import Memory
from common.engine.meter import StepMeter, follow_engine
from common.engine.thread import EngineThread
from common.errors import (
    CapabilityRefused,
    Draining,
    RequestAborted,
    TransferFailed,
    WorkerLost,
)
from common.rpc.worker_info import WorkerIdentity
from common.telemetry.metrics import WorkerMetrics
from common.transfer.handoff import HandoffKey
from common.types import RequestContext
from services.prefill.courses import Courses
from services.prefill.handoff import Handoff
from services.prefill.job import Job
from services.prefill.jobs import Jobs
from services.prefill.leases import Leases
from services.prefill.loop import FirstTokenSampled, PrefillReport, run_prefill_loop
from services.prefill.peers import Peers
from services.prefill.quarantine import ASK_TIMEOUT_S, Quarantine
from services.prefill.requests import require_continuation, require_possible
from services.prefill.room import Room
from services.prefill.sender import DecodeTicket, Sender

logger = logging.getLogger(__name__)

Work = Callable[[Job], Coroutine[Any, Any, None]]


class PrefillWorker:
    """Everything that routers ask of a prefill worker, and decode workers that gave up. Lives on the event loop."""

    def __init__(
        self,
        engine: Steps,
        *,
        identity: WorkerIdentity,
        sender: Sender,
        peers: Peers,
        metrics: WorkerMetrics,
        max_queued: int,
        job_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self.metrics = metrics
        self._has_less = asyncio.Event()
        """Set whenever a job, a lease or a write in quarantine has ended."""
        self.counts: Counter[str] = Counter()
        self.leases = Leases(
            lease_s=sender.config.lease_s,
            clock=clock,
            on_ended=self._on_lease_ended,
        )
        self.room = Room(
            Memory(
                num_pages=identity.num_pages,
                num_slots=identity.num_slots,
                num_groups=identity.mesh.dp,
            ),
            self.leases,
            max_queued=max_queued,
        )
        self.quarantine = Quarantine(self._is_receiver_gone, on_left=self._has_less.set)
        self.engine = EngineThread(
            engine,
            run_prefill_loop,
            on_report=self._on_report,
            on_crash=self._on_crash,
            ends_step=lambda report: report.step is not None,
        )
        self.is_draining = False
        self._is_closed = False
        self.pairs = sender.pairs
        self._peers = peers
        self._clock = clock
        self.jobs = Jobs(self._has_less.set)
        self._courses = Courses(
            identity=identity,
            engine=self.engine,
            room=self.room,
            quarantine=self.quarantine,
            sender=sender,
            peers=peers,
            job_timeout_s=job_timeout_s,
            clock=clock,
            counts=self.counts,
            on_freed=self.jobs.forget,
        )
        self._meter = StepMeter(metrics, draft_length=identity.draft_length)
        self._measure(metrics)

    @property
    def num_jobs(self) -> int:
        """Requests that wait, compute or hand over."""
        return len(self.jobs)

    async def prefill(self, context: RequestContext, ticket: DecodeTicket) -> Job:
        """Begin a prefill; an older epoch of the request is ended first. Whoever stops listening cancels the job.

        Raises Draining, InvalidRequest, ContextLengthExceeded, and DuplicateRequest or RequestNotFound when the
        request is here in this or a newer epoch.
        """
        if self.is_draining:
            raise Draining("this prefill worker is draining")
        if self.engine.has_crashed:
            raise WorkerLost("the engine of this prefill worker has failed")
        require_possible(self.identity, context)
        job = Job(context, ticket, arrived_at=self._clock(), num_to_compute=context.length)
        return await self._begin(job, self._courses.compute)

    async def hand_off(self, lease_id: str, context: RequestContext, ticket: DecodeTicket) -> Job:
        """Begin to hand leased state to another decode worker; any number of them may read it at the same time.

        A draining worker does so too: nothing is computed. Raises LeaseEnded, InvalidRequest when the context is not
        one that the state can continue, and what `prefill` does about epochs.
        """
        lease = self.leases.open(lease_id)
        try:
            require_continuation(context, lease.state)
            job = Job(context, ticket, arrived_at=self._clock(), num_to_compute=0)
            return await self._begin(job, lambda job: self._courses.hand_off(job, lease))
        except BaseException:
            # The job never began, so nothing else closes what was opened for it.
            self.room.close_lease(lease)
            raise

    async def stop_handoff(self, key: HandoffKey, capability: bytes) -> bool:
        """The receiver gave a hand-off up: end it, and say whether it has certainly stopped writing.

        True for everything that is not here: every write belongs to a job or is in quarantine. Raises
        CapabilityRefused when the secret is not the hand-off's.
        """
        if self._is_closed:
            raise WorkerLost("the prefill worker stops")
        job = self.jobs.of_handoff(key)
        if job is not None:
            if not hmac.compare_digest(job.ticket.capability, capability):
                raise CapabilityRefused(
                    f"the capability is not that of reservation {key.reservation_id!r}"
                )
            job.cancel(TransferFailed("the decode worker gave the hand-off up"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    await job.freed.wait()
            if not job.freed.is_set():
                return False
        return await self.quarantine.has_stopped(key)

    def renew_leases(self, lease_ids: Sequence[str]) -> list[str]:
        """Let leases begin anew; returns those that have ended."""
        return self.leases.renew(lease_ids)

    def release_lease(self, lease_id: str) -> bool:
        """Free a finished request's state, or end the job that would leave it; False when there is neither."""
        was_found = self.leases.release(lease_id)
        for job in self.jobs:
            if not was_found and job.ticket.reservation_id == lease_id:
                job.cancel(RequestAborted("the router released the state before it was there"))
                was_found = True
        self.room.serve_queue()
        return was_found

    def expire(self) -> None:
        """End overdue leases. Called every second or so."""
        if self.leases.expire():
            self.room.serve_queue()

    async def tend(self) -> None:
        """End what is overdue and ask after writes that did not stop; called about every second."""
        self.expire()
        await self.quarantine.ask_all()

    def begin_draining(self) -> None:
        """Take nothing new."""
        self.is_draining = True
        logger.info("draining %d requests and %d leases", self.num_jobs, len(self.leases))

    @property
    def is_safe_to_delete(self) -> bool:
        """Whether it drains and has nothing any more that a request could need or that a write could still read."""
        return self.is_draining and self._is_idle

    async def wait_idle(self) -> None:
        """Return once there are no jobs, leases and pages in quarantine. The caller sets the deadline.

        Routers renew leases as long as the requests live whose state these keep; those that nobody renews expire.
        """
        while not self._is_idle:
            self._has_less.clear()
            await self._has_less.wait()

    async def close(self) -> None:
        """Take nothing new, end what is left and stop the engine. Memory in quarantine ends with the process."""
        self.is_draining = self._is_closed = True
        jobs = tuple(self.jobs)
        for job in jobs:
            job.cancel(WorkerLost("the prefill worker stops"))
        ended = asyncio.gather(*(job.wait_ended() for job in jobs))
        await self.engine.stop(after=ended)
        await ended
        await self.pairs.close()
        await self._peers.close()

    def _measure(self, metrics: WorkerMetrics) -> None:
        """What is full or waits here is looked up whenever metrics are asked for, on the asker's thread."""
        follow_engine(metrics.engine, self.engine, self.room.memory)
        metrics.transfer.leases.set_function(lambda: len(self.leases))
        metrics.transfer.quarantined_pages.set_function(lambda: self.quarantine.num_pages)
        metrics.engine.queue_requests.set_function(lambda: self.room.num_queued)
        metrics.engine.running_requests.set_function(lambda: self.num_jobs - self.room.num_queued)
        metrics.engine.queue_uncached_tokens.set_function(
            lambda: sum(job.num_uncomputed for job in self.jobs)
        )

    @property
    def _is_idle(self) -> bool:
        return not self.jobs and not self.leases and not self.quarantine

    async def _begin(self, job: Job, work: Work) -> Job:
        self._peers.channel(job.ticket.address)
        await self.jobs.make_way(job.context)
        if self._is_closed:
            raise WorkerLost("the prefill worker stops")
        self.jobs.add(job)
        job.start(work(job))
        return job

    async def _is_receiver_gone(self, handoff: Handoff) -> bool:
        return await self._peers.is_gone(
            handoff.peer, handoff.receiver_generation, timeout_s=ASK_TIMEOUT_S
        )

    def _on_lease_ended(self, why: str) -> None:
        self.metrics.transfer.leases_ended.labels(reason=why).inc()
        self._has_less.set()

    def _on_report(self, report: PrefillReport) -> None:
        for progress in report.progress:
            job = self.jobs.of_epoch(progress.request_id, progress.epoch)
            is_first = isinstance(progress, FirstTokenSampled)
            if job is not None:
                job.progressed(progress)
                if is_first:
                    self.metrics.engine.queue_duration.observe(job.queue_s)
            elif is_first:
                self.metrics.engine.tokens_discarded.inc()  # the job was cancelled meanwhile
        if report.step is not None:
            self._meter.count(report.step)

    def _on_crash(self, error: Exception) -> None:
        for job in self.jobs:
            job.cancel(WorkerLost("the engine of the prefill worker failed"))
