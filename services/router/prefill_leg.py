"""One call to a prefill worker, for a prefill or for state that it keeps. Knows messages and failures; decides nothing."""

from __future__ import annotations

import asyncio

import grpc.aio

from common.errors import DeadlinePassed, ServingError, TransferFailed, WorkerLost
from common.rpc import convert
from common.rpc.status import error_of_call
from dspark.v1 import prefill_service_pb2 as pb
from services.router.events import Event, Failed, FirstToken, HandedOff
from services.router.prefill_worker import PrefillWorker


async def run_prefill(
    worker: PrefillWorker, request: pb.PrefillRequest, inbox: asyncio.Queue[Event], timeout_s: float
) -> None:
    """Report a prefill to `inbox` until its state is handed over or it failed; cancelling this cancels the prefill."""
    call = worker.stub.Prefill(request, timeout=timeout_s)
    error = await _follow(call, worker.address, inbox)
    if error is not None:
        inbox.put_nowait(Failed(error=error, worker=worker.address, role=worker.role))


async def run_handoff(
    worker: PrefillWorker, request: pb.HandOffRequest, inbox: asyncio.Queue[Event], timeout_s: float
) -> None:
    """Report a hand-off of leased state to `inbox`; cancelling this gives the hand-off up."""
    call = worker.stub.HandOff(request, timeout=timeout_s)
    try:
        response = await call
    except grpc.aio.AioRpcError as error:
        failed = _failure(error, worker.address)
        inbox.put_nowait(Failed(error=failed, worker=worker.address, role=worker.role))
    else:
        inbox.put_nowait(_handed_off(response.done))
    finally:
        call.cancel()


async def _follow(
    call: grpc.aio.UnaryStreamCall[pb.PrefillRequest, pb.PrefillResponse],
    address: str,
    inbox: asyncio.Queue[Event],
) -> ServingError | None:
    is_handed_off = False
    try:
        async for response in call:
            event = _event_from_pb(response)
            if event is not None:
                is_handed_off |= isinstance(event, HandedOff)
                inbox.put_nowait(event)
    except grpc.aio.AioRpcError as error:
        return _failure(error, address)
    finally:
        call.cancel()
    if not is_handed_off:
        return TransferFailed(f"prefill worker {address} ended without a hand-off")
    return None


def _event_from_pb(response: pb.PrefillResponse) -> FirstToken | HandedOff | None:
    match response.WhichOneof("event"):
        case "first_token":
            first = response.first_token
            has_logprob = first.HasField("logprob")
            return FirstToken(
                token_id=first.token_id,
                logprob=convert.logprob_from_pb(first.logprob) if has_logprob else None,
                queue_s=first.queue_s,
                compute_s=first.compute_s,
            )
        case "handoff_done":
            return _handed_off(response.handoff_done)
        case _:
            return None


def _handed_off(done: pb.HandoffDone) -> HandedOff:
    return HandedOff(lease_id=done.lease_id, lease_s=done.lease_s)


def _failure(error: grpc.aio.AioRpcError, address: str) -> ServingError:
    """Our own deadline ends the request by itself; one that a worker set is the worker's failure."""
    known = error_of_call(error, peer=address)
    return WorkerLost(known.message) if isinstance(known, DeadlinePassed) else known
