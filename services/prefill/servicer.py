"""The prefill worker on the wire. Converts and delegates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from common.errors import RequestAborted
from common.rpc import convert
from common.rpc.worker_info import WorkerLoad, worker_info_to_pb
from dspark.v1 import prefill_service_pb2 as pb
from dspark.v1.prefill_service_pb2_grpc import (
    PrefillServiceServicer,
    add_PrefillServiceServicer_to_server,
)
from services.prefill.events import Event, FirstToken, HandoffDone
from services.prefill.handoff import DecodeTicket
from services.prefill.worker import PrefillWorker

SERVICE_NAMES = ("dspark.v1.PrefillService",)

Context = Any


def register(worker: PrefillWorker, server: grpc.aio.Server) -> None:
    """Add everything that a prefill worker serves."""
    add_PrefillServiceServicer_to_server(PrefillServicer(worker), server)


class PrefillServicer(PrefillServiceServicer):
    """What routers ask."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Prefill(
        self, request: pb.PrefillRequest, context: Context
    ) -> AsyncIterator[pb.PrefillResponse]:
        ticket = DecodeTicket(
            address=request.ticket.decode_address,
            reservation_id=request.ticket.reservation_id,
            capability=request.ticket.capability,
        )
        job = await self._worker.prefill(convert.context_from_pb(request.context), ticket)
        try:
            async for event in job.events():
                yield _event_to_pb(event)
        finally:
            job.cancel(RequestAborted("the router cancelled the prefill"))

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
        num_free_pages=memory.pages.num_free,
        num_free_slots=memory.slots.num_free,
        queued_requests=worker.room.num_queued,
        running_requests=worker.num_jobs - worker.room.num_queued,
        num_leases=len(worker.leases),
        draining=worker.is_draining,
        details={"expired_leases": str(worker.leases.num_expired)},
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
                    handoff_s=event.handoff_s,
                    transfer_engine=event.transfer_engine,
                )
            )
