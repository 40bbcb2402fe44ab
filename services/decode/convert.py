"""Messages of decode_service.proto to the nouns of this service and back. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable

from common.rpc import convert
from dspark.v1 import decode_service_pb2 as pb
from services.decode.commits import CommitOrder
from services.decode.events import Admitted, Event, Failed, Finished, Verified


def commit_from_pb(message: pb.Commit) -> CommitOrder:
    return CommitOrder(round=message.round, length=message.length, finish=message.finish)


def events_to_pb(events: Iterable[Event]) -> pb.DecodeResponse:
    return pb.DecodeResponse(events=[_event_to_pb(event) for event in events])


def _event_to_pb(event: Event) -> pb.DecodeEvent:
    match event:
        case Verified():
            return pb.DecodeEvent(verified=_verified_to_pb(event))
        case Admitted():
            return pb.DecodeEvent(admitted=_admitted_to_pb(event))
        case Finished():
            return pb.DecodeEvent(
                finished=pb.Finished(request_id=event.request_id, epoch=event.epoch)
            )
        case Failed():
            return pb.DecodeEvent(
                failed=pb.Failed(
                    request_id=event.request_id,
                    epoch=event.epoch,
                    reason=event.error.reason,
                    message=event.error.message,
                )
            )


def _verified_to_pb(event: Verified) -> pb.Verified:
    result = event.result
    return pb.Verified(
        request_id=event.request_id,
        epoch=event.epoch,
        round=result.round,
        base=result.base,
        token_ids=result.token_ids,
        num_draft=result.num_draft,
        num_accepted=result.num_accepted,
        logprobs=[convert.logprob_to_pb(logprob) for logprob in result.logprobs],
        confidences=result.confidences,
    )


def _admitted_to_pb(event: Admitted) -> pb.Admitted:
    logprob = event.first_logprob
    return pb.Admitted(
        request_id=event.request_id,
        epoch=event.epoch,
        first_token_id=event.first_token_id,
        drafter_fallback=event.drafter_fallback,
        transfer_engine=event.transfer_engine,
        first_logprob=convert.logprob_to_pb(logprob) if logprob else None,
    )
