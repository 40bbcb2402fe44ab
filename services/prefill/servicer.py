"""The prefill worker on the wire. Converts and delegates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from common.errors import InvalidRequest, RequestAborted
from common.rpc import convert
from common.rpc.worker_info import WorkerLoad, worker_info_to_pb
from common.transfer import convert as transfer_convert
from dspark.v1 import prefill_service_pb2 as pb
from dspark.v1.prefill_service_pb2_grpc import (
    PrefillServiceServicer,
    add_PrefillServiceServicer_to_server,
)
from services.prefill.events import Event, FirstToken, HandoffDone
from services.prefill.sender import DecodeTicket
from services.prefill.worker import PrefillWorker

SERVICE_NAMES = ("dspark.v1.PrefillService",)

MAX_RENEWALS = 4096
"""Leases in one call of RenewLeases."""

Context = Any


def register(worker: PrefillWorker, server: grpc.aio.Server) -> None:
    """Add everything that a prefill worker serves."""
    add_PrefillServiceServicer_to_server(PrefillServicer(worker), server)


class PrefillServicer(PrefillServiceServicer):
    """What routers ask."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Connect(self, request: pb.ConnectRequest, context: Context) -> pb.ConnectResponse:
        pair = await self._worker.pairs.connect(request.decode_address, request.decode_generation)
        return pb.ConnectResponse(transfer_engine=pair.engine.name, reason=pair.reason)

    async def Prefill(
        self, request: pb.PrefillRequest, context: Context
    ) -> AsyncIterator[pb.PrefillResponse]:
        job = await self._worker.prefill(
            convert.context_from_pb(request.context), _ticket_from_pb(request.ticket)
        )
        try:
            async for event in job.events():
                yield _event_to_pb(event)
        finally:
            job.cancel(RequestAborted("the router cancelled the prefill"))

    async def HandOff(self, request: pb.HandOffRequest, context: Context) -> pb.HandOffResponse:
        job = await self._worker.hand_off(
            request.lease_id,
            convert.context_from_pb(request.context),
            _ticket_from_pb(request.ticket),
        )
        try:
            (done,) = [event async for event in job.events()]
        finally:
            job.cancel(RequestAborted("the router cancelled the hand-off"))
        return pb.HandOffResponse(done=_event_to_pb(done).handoff_done)

    async def RenewLeases(
        self, request: pb.RenewLeasesRequest, context: Context
    ) -> pb.RenewLeasesResponse:
        if len(request.lease_ids) > MAX_RENEWALS:
            raise InvalidRequest(
                f"{len(request.lease_ids)} leases to renew; at most {MAX_RENEWALS} in one call"
            )
        return pb.RenewLeasesResponse(ended_lease_ids=self._worker.renew_leases(request.lease_ids))

    async def StopHandoff(
        self, request: pb.StopHandoffRequest, context: Context
    ) -> pb.StopHandoffResponse:
        key = transfer_convert.key_from_pb(request.key)
        with self._worker.metrics.transfer.counting_refusals():
            has_stopped = await self._worker.stop_handoff(key, request.capability)
        return pb.StopHandoffResponse(
            stopped=has_stopped, generation=self._worker.identity.generation
        )

    async def ReleaseLease(
        self, request: pb.ReleaseLeaseRequest, context: Context
    ) -> pb.ReleaseLeaseResponse:
        return pb.ReleaseLeaseResponse(found=self._worker.release_lease(request.lease_id))

    async def GetWorkerInfo(
        self, request: pb.PrefillServiceGetWorkerInfoRequest, context: Context
    ) -> pb.PrefillServiceGetWorkerInfoResponse:
        info = worker_info_to_pb(self._worker.identity, load_of(self._worker))
        return pb.PrefillServiceGetWorkerInfoResponse(info=info)


def load_of(worker: PrefillWorker) -> WorkerLoad:
    """How full the worker is, in figures."""
    memory = worker.room.memory
    return WorkerLoad(
        num_free_pages=memory.num_free_pages,
        num_free_slots=memory.num_free_slots,
        queued_requests=worker.room.num_queued,
        running_requests=worker.num_jobs - worker.room.num_queued,
        num_leases=len(worker.leases),
        num_quarantined_pages=worker.quarantine.num_pages,
        draining=worker.is_draining,
        safe_to_delete=worker.is_safe_to_delete,
        details={
            "expired_leases": str(worker.leases.num_expired),
            "lease_handoffs": str(worker.counts["lease_handoffs"]),
            **worker.pairs.details(),
        },
    )


def _ticket_from_pb(message: pb.DecodeTicket) -> DecodeTicket:
    return DecodeTicket(
        address=message.decode_address,
        reservation_id=message.reservation_id,
        capability=message.capability,
    )


def _event_to_pb(event: Event) -> pb.PrefillResponse:
    match event:
        case FirstToken():
            return pb.PrefillResponse(
                first_token=pb.FirstToken(
                    token_id=event.token_id,
                    logprob=convert.logprob_to_pb(event.logprob) if event.logprob else None,
                    queue_s=event.queue_s,
                    compute_s=event.compute_s,
                )
            )
        case HandoffDone():
            return pb.PrefillResponse(
                handoff_done=pb.HandoffDone(
                    lease_id=event.lease_id,
                    lease_s=event.lease_s,
                    num_bytes=event.num_bytes,
                    num_late_bytes=event.num_late_bytes,
                    handoff_s=event.handoff_s,
                    wire_s=event.wire_s,
                    total_wire_s=event.total_wire_s,
                    digest_s=event.digest_s,
                    transfer_engine=event.transfer_engine,
                )
            )
