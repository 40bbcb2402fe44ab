"""From a gRPC status to a typed error. Knows codes and google.rpc details; raises nothing itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from dspark import errors

DOMAIN = "dspark"
"""google.rpc.ErrorInfo.domain of every answer that comes from DSpark itself."""

_BY_CODE: dict[grpc.StatusCode, type[errors.APIStatusError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.BadRequestError,
    grpc.StatusCode.OUT_OF_RANGE: errors.BadRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.BadRequestError,
    grpc.StatusCode.UNIMPLEMENTED: errors.BadRequestError,
    grpc.StatusCode.UNAUTHENTICATED: errors.AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: errors.AuthenticationError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.RateLimitError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.ABORTED: errors.StreamInterruptedError,
    grpc.StatusCode.CANCELLED: errors.RequestAbortedError,
}
_INTERRUPTIONS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What of a request's result had arrived when it failed."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


NOTHING = Received()


def error_from_call(
    call: grpc.RpcError, *, request_id: str, received: Received = NOTHING
) -> errors.DSparkError:
    """The typed error of a failed call, synchronous or not."""
    code = call.code()
    message = call.details() or code.name
    cause = _cause_of(call)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.APITimeoutError(message, request_id=request_id)
    if code is grpc.StatusCode.UNAVAILABLE and not cause.reason and not received.token_ids:
        # Without a word from DSpark itself, UNAVAILABLE is gRPC's own: nobody answered.
        return errors.APIConnectionError(message, request_id=request_id)
    error = _error_class(code, message, cause, received)(
        message,
        request_id=request_id,
        code=code.name,
        reason=cause.reason,
        metadata=cause.metadata,
        retry_after_s=cause.retry_after_s,
    )
    if isinstance(error, errors.StreamInterruptedError):
        error.text, error.token_ids = received.text, received.token_ids
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """What the server said besides code and message."""

    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None


def _error_class(
    code: grpc.StatusCode, message: str, cause: _Cause, received: Received
) -> type[errors.APIStatusError]:
    if code in _INTERRUPTIONS and received.token_ids:
        return errors.StreamInterruptedError
    if cause.reason == "CONTEXT_LENGTH_EXCEEDED":
        return errors.ContextLengthExceededError
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not cause.reason and "larger than" in message:
        # gRPC gives its message size limit the code of a full server; trying again would not help.
        return errors.BadRequestError
    return _BY_CODE.get(code, errors.InternalError)


def _cause_of(call: grpc.RpcError) -> _Cause:
    status = rpc_status.from_call(call)
    cause = _Cause()
    for detail in status.details if status else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            cause = replace(cause, reason=info.reason, metadata=dict(info.metadata))
        elif detail.Unpack(retry):
            cause = replace(cause, retry_after_s=retry.retry_delay.ToMilliseconds() / 1000)
    return cause
