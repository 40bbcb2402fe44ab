"""What a job goes through: room, engine and hand-off to a lease, or from a lease to another decode worker. Knows the order
of things and how each of them is undone; not which jobs there are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable

from common.engine.memory import RequestMemory
from common.engine.thread import EngineThread
from common.errors import DeadlinePassed, ServingError
from common.rpc.worker_info import WorkerIdentity
from common.telemetry.tracing import part, record
from common.transfer.handoff import HandoffKey
from common.types import RequestContext
from services.prefill.events import HandoffDone
from services.prefill.handoff import Handoff
from services.prefill.job import Job
from services.prefill.leases import FinishedState, Lease
from services.prefill.loop import PrefillReport, PromptFinished
from services.prefill.peers import Peers
from services.prefill.quarantine import ASK_TIMEOUT_S, Quarantine
from services.prefill.requests import prompt_request
from services.prefill.room import Room
from services.prefill.sender import Sender

logger = logging.getLogger(__name__)


class Courses:
    """The two ways that jobs of a worker go; each ends with everything given back, to a lease or to the room.

    `on_freed` is told of a job when its memory is not its own any more, once or twice.
    """

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        engine: EngineThread[PrefillReport],
        room: Room,
        quarantine: Quarantine,
        sender: Sender,
        peers: Peers,
        job_timeout_s: float,
        clock: Callable[[], float],
        counts: Counter[str],
        on_freed: Callable[[Job], None],
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._room = room
        self._quarantine = quarantine
        self._sender = sender
        self._peers = peers
        self._job_timeout_s = job_timeout_s
        self._clock = clock
        self._counts = counts
        self._on_freed = on_freed

    async def compute(self, job: Job) -> None:
        """Compute a prompt, hand its state over, and leave it under a lease."""
        try:
            async with self._in_time():
                memory = await self._room.acquire(self._max_length(job.context))
            await self._compute_in(memory, job)
        finally:
            self._on_freed(job)

    async def hand_off(self, job: Job, lease: Lease) -> None:
        """Send what a lease keeps. It was computed before, so all of it can go at once."""
        try:
            handoff = self._handoff(job, lease.memory, len(lease.state.tokens))
            async with self._giving_up(
                job, handoff, lambda: self._room.close_lease(lease), is_computing=False
            ):
                began_at = self._clock()
                async with self._in_time():
                    with part("kv_transfer.negotiate"):
                        await handoff.negotiate()
                    await handoff.finish(lease.state.finished)
                job.is_ending = True
                self._counts["lease_handoffs"] += 1
                self._sender.metrics.lease_handoffs.inc()
                self._report_done(job, handoff, lease, since=began_at)
            self._room.close_lease(lease)
        finally:
            self._on_freed(job)

    async def _compute_in(self, memory: RequestMemory, job: Job) -> None:
        """Compute and hand over; ends with a lease or with everything given back."""
        handoff = self._handoff(job, memory, job.context.length)
        async with self._giving_up(
            job, handoff, lambda: self._room.release(memory), is_computing=True
        ):
            max_length = self._max_length(job.context)
            self._engine.add(prompt_request(job.context, memory, max_length=max_length))
            async with self._in_time():
                finished = await self._hand_over(job, handoff)
            state = FinishedState(tokens=tuple(job.context.tokens), finished=finished)
            # Named after the reservation, so that a router can free it even if it never heard of the lease.
            lease = self._room.leases.grant(memory, state, lease_id=job.ticket.reservation_id)
            job.is_ending = True
            since = finished.finished_at
            tail = handoff.writes.bytes_after(since) / handoff.writes.num_bytes
            self._sender.metrics.handoff_tail.observe(tail)
            self._report_done(job, handoff, lease, since=since)
        self._room.serve_queue()

    async def _hand_over(self, job: Job, handoff: Handoff) -> PromptFinished:
        """Send pages as they close while the engine computes the next ones, the rest while it samples and drafts."""
        with part("kv_transfer.negotiate"):
            await handoff.negotiate()
        while job.finished is None:
            await job.wait_progress()
            await handoff.send_computed(job.num_computed)
        _trace_compute(job, job.finished)
        await handoff.finish(job.finished)
        return job.finished

    @contextlib.asynccontextmanager
    async def _giving_up(
        self, job: Job, handoff: Handoff, free: Callable[[], None], *, is_computing: bool
    ) -> AsyncIterator[None]:
        """When the block fails: stop computing and sending, free the room, tell the decode worker; in this order.

        What may still be written goes into quarantine instead of being freed.
        """
        why = "cancelled"
        try:
            with self._sender.metrics.handoffs_in_progress.track_inprogress():
                yield
        except BaseException as error:
            if isinstance(error, ServingError):
                why = error.message
            job.is_ending = True
            if is_computing:
                # Bounded by the engine's step alone, as its pages are; whoever wants the job gone has a deadline of its own.
                await self._engine.remove(job.context.request_id)
            has_stopped = await handoff.stop(timeout_s=ASK_TIMEOUT_S)
            if has_stopped:
                free()
            else:
                self._quarantine.hold(handoff, free)
            self._on_freed(job)
            logger.info(
                "request given up: %s",
                why,
                extra={"request_id": job.context.request_id, "epoch": job.context.epoch},
            )
            if has_stopped:
                await handoff.abort(why)
            raise

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._job_timeout_s):
                yield
        except TimeoutError:
            raise DeadlinePassed(f"a prefill took longer than {self._job_timeout_s} s") from None

    def _report_done(self, job: Job, handoff: Handoff, lease: Lease, *, since: float) -> None:
        writes = handoff.writes
        handoff_s, wire_s = self._clock() - since, writes.seconds_after(since)
        metrics, engine = self._sender.metrics, handoff.engine_name
        metrics.handoff_duration.labels(engine=engine).observe(handoff_s)
        metrics.handoff_overhead.labels(engine=engine).observe(handoff_s - wire_s)
        job.put(
            HandoffDone(
                lease_id=lease.lease_id,
                lease_s=self._room.leases.lease_s,
                num_bytes=writes.num_bytes,
                num_late_bytes=writes.bytes_after(since),
                handoff_s=handoff_s,
                wire_s=wire_s,
                total_wire_s=writes.seconds,
                digest_s=handoff.waits.seconds_after(since),
                transfer_engine=engine,
            )
        )
        logger.debug(
            "request handed over",
            extra={
                "request_id": job.context.request_id,
                "epoch": job.context.epoch,
                "tokens": len(lease.state.tokens),
                "length": job.context.length,
                "decode_worker": job.ticket.address,
                "bytes": writes.num_bytes,
                "transfer_engine": engine,
                "handoff_s": round(handoff_s, 4),
                "wire_s": round(wire_s, 4),
            },
        )

    def _max_length(self, context: RequestContext) -> int:
        """Room for the prompt, the first token and a proposal behind it; the rest is the decode worker's affair."""
        return min(context.max_length, context.length + 1 + self._identity.draft_length + 1)

    def _handoff(self, job: Job, memory: RequestMemory, num_tokens: int) -> Handoff:
        context, ticket = job.context, job.ticket
        key = HandoffKey(
            request_id=context.request_id,
            epoch=context.epoch,
            reservation_id=ticket.reservation_id,
            prefill_generation=self._identity.generation,
        )
        return Handoff(
            self._sender,
            key,
            ticket,
            self._peers.handoff_stub(ticket.address),
            source=self._sender.memory.placement(
                page_ids=tuple(memory.block_table), slot=memory.slot
            ),
            num_tokens=num_tokens,
        )


def _trace_compute(job: Job, finished: PromptFinished) -> None:
    """The engine's own times: it knows no spans."""
    first = finished.first
    record("prefill.queue", began=job.arrived_at, ended=first.first_scheduled_at)
    record(
        "prefill.compute",
        began=first.first_scheduled_at,
        ended=first.sampled_at,
        attributes={"dspark.computed_tokens": job.context.length},
    )
    record("prefill.draft", began=first.sampled_at, ended=finished.finished_at)
