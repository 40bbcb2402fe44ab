"""The decode worker on the wire. Converts and delegates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from common.errors import InvalidRequest
from common.rpc import convert, transfer_stream
from common.rpc.worker_info import WorkerLoad, worker_info_to_pb
from common.transfer import convert as transfer_convert
from common.types import RequestId
from dspark.v1 import decode_service_pb2, decode_service_pb2_grpc, handoff_service_pb2
from dspark.v1.handoff_service_pb2_grpc import (
    HandoffServiceServicer,
    add_HandoffServiceServicer_to_server,
)
from services.decode.commits import Outbox
from services.decode.convert import commit_from_pb, events_to_pb
from services.decode.reservations import ReservationState
from services.decode.worker import DecodeWorker

SERVICE_NAMES = (
    "dspark.v1.DecodeService",
    "dspark.v1.HandoffService",
    transfer_stream.SERVICE_NAME,
)

Context = Any


def register(worker: DecodeWorker, server: grpc.aio.Server) -> None:
    """Add everything that a decode worker serves."""
    decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(worker), server)
    add_HandoffServiceServicer_to_server(HandoffServicer(worker), server)
    counting = worker.metrics.transfer.counting_refusals
    server.add_generic_rpc_handlers((transfer_stream.handler(_authorize_with(worker), counting),))


class DecodeServicer(decode_service_pb2_grpc.DecodeServiceServicer):
    """What routers ask."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Reserve(
        self, request: decode_service_pb2.ReserveRequest, context: Context
    ) -> decode_service_pb2.ReserveResponse:
        with self._worker.metrics.transfer.counting_refusals():
            reservation = await self._worker.reserve(
                RequestId(request.request_id),
                request.epoch,
                num_tokens=request.num_tokens,
                max_length=request.max_length,
                model_fingerprint=request.model_fingerprint,
            )
        return decode_service_pb2.ReserveResponse(
            reservation_id=reservation.reservation_id,
            capability=reservation.capability,
            expires_s=self._worker.reservations.lifetime_s,
            computes_prompt=self._worker.identity.computes_prompts,
        )

    async def Decode(
        self,
        request_iterator: AsyncIterator[decode_service_pb2.DecodeRequest],
        context: Context,
    ) -> AsyncIterator[decode_service_pb2.DecodeResponse]:
        outbox = Outbox()
        reader = asyncio.create_task(self._read(request_iterator, outbox))
        try:
            while events := await outbox.take():
                yield events_to_pb(events)
            await reader
        finally:
            reader.cancel()
            self._worker.stream_ended(outbox)
            with contextlib.suppress(asyncio.CancelledError, InvalidRequest):
                await reader

    async def GetWorkerInfo(
        self,
        request: decode_service_pb2.DecodeServiceGetWorkerInfoRequest,
        context: Context,
    ) -> decode_service_pb2.DecodeServiceGetWorkerInfoResponse:
        info = worker_info_to_pb(self._worker.identity, load_of(self._worker))
        return decode_service_pb2.DecodeServiceGetWorkerInfoResponse(info=info)

    async def _read(
        self, requests: AsyncIterator[decode_service_pb2.DecodeRequest], outbox: Outbox
    ) -> None:
        try:
            async for request in requests:
                with self._worker.metrics.transfer.counting_refusals():
                    for command in request.commands:
                        self._obey(command, outbox)
        finally:
            outbox.close()

    def _obey(self, command: decode_service_pb2.DecodeCommand, outbox: Outbox) -> None:
        match command.WhichOneof("command"):
            case "admit":
                admit = command.admit
                context = convert.context_from_pb(admit.context)
                self._worker.admit(
                    outbox, context, admit.reservation_id, admit.capability, admit.traceparent
                )
            case "commit":
                commit = command.commit
                self._worker.commit(
                    outbox, RequestId(commit.request_id), commit.epoch, commit_from_pb(commit)
                )
            case "abort":
                abort = command.abort
                self._worker.abort(
                    outbox, RequestId(abort.request_id), abort.epoch, abort.reservation_id
                )
            case _:
                raise InvalidRequest("a command says neither admit nor commit nor abort")


class HandoffServicer(HandoffServiceServicer):
    """What prefill workers ask."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._intake = worker.intake
        self._meetings = worker.meetings
        self._quarantine = worker.quarantine
        self._refusals = worker.metrics.transfer

    async def Meet(
        self, request: handoff_service_pb2.MeetRequest, context: Context
    ) -> handoff_service_pb2.MeetResponse:
        with self._refusals.counting_refusals():
            introduction = transfer_convert.introduction_from_pb(request)
            return transfer_convert.acquaintance_to_pb(self._meetings.meet(introduction))

    async def Negotiate(
        self, request: handoff_service_pb2.NegotiateRequest, context: Context
    ) -> handoff_service_pb2.NegotiateResponse:
        key = transfer_convert.key_from_pb(request.key)
        offer = transfer_convert.offer_from_pb(request)
        with self._refusals.counting_refusals():
            terms = self._intake.negotiate(key, request.capability, offer)
        return transfer_convert.terms_to_pb(terms)

    async def Arrived(
        self, request: handoff_service_pb2.ArrivedRequest, context: Context
    ) -> handoff_service_pb2.ArrivedResponse:
        key = transfer_convert.key_from_pb(request.key)
        entries = transfer_convert.entries_from_pb(request.rows)
        with self._refusals.counting_refusals():
            await self._intake.arrived(key, request.capability, entries)
        return handoff_service_pb2.ArrivedResponse()

    async def Complete(
        self, request: handoff_service_pb2.CompleteRequest, context: Context
    ) -> handoff_service_pb2.CompleteResponse:
        key = transfer_convert.key_from_pb(request.key)
        result = transfer_convert.result_from_pb(request)
        with self._refusals.counting_refusals():
            is_whole = await self._intake.complete(key, request.capability, result)
        return handoff_service_pb2.CompleteResponse(
            accepted=is_whole, resend=not is_whole, digest_s=self._intake.digest_s(key)
        )

    async def AbortHandoff(
        self, request: handoff_service_pb2.AbortHandoffRequest, context: Context
    ) -> handoff_service_pb2.AbortHandoffResponse:
        key = transfer_convert.key_from_pb(request.key)
        with self._refusals.counting_refusals():
            if self._intake.abort(key, request.capability, request.reason) is None:
                self._quarantine.acknowledge(key, request.capability)
        return handoff_service_pb2.AbortHandoffResponse()


def load_of(worker: DecodeWorker) -> WorkerLoad:
    """How full the worker is, in figures."""
    reservations = worker.reservations
    return WorkerLoad(
        num_free_pages=worker.room.num_free_pages,
        num_free_slots=worker.room.num_free_slots,
        queued_requests=reservations.num_in(
            ReservationState.RESERVED, ReservationState.RECEIVING, ReservationState.READY
        ),
        running_requests=reservations.num_in(ReservationState.RUNNING),
        num_quarantined_pages=worker.quarantine.num_pages,
        draining=worker.is_draining,
        safe_to_delete=worker.is_safe_to_delete,
        details={
            **{name: str(count) for name, count in worker.intake.counts.items()},
            **worker.meetings.details(),
        },
    )


def _authorize_with(worker: DecodeWorker) -> transfer_stream.Authorize:
    def authorize(key: bytes, capability: bytes) -> transfer_stream.Write:
        message = handoff_service_pb2.HandoffKey.FromString(key)
        return worker.intake.writer(transfer_convert.key_from_pb(message), capability)

    return authorize
