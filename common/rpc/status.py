"""`ServingError` to gRPC status and back. Knows codes and details; raises nothing by itself.

An error travels as a status with `google.rpc.ErrorInfo` (reason, domain "dspark", metadata) and, when it may pass,
`RetryInfo`. The reason alone decides which class it becomes on the other side.
"""

from __future__ import annotations

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from common.errors import (
    CapacityExhausted,
    DeadlinePassed,
    ErrorKind,
    InvalidRequest,
    RequestAborted,
    ServingError,
    WorkerLost,
)

ERROR_DOMAIN = "dspark"
RETRY_PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""Trailing metadata that gRPC clients with a retry policy wait for by themselves."""

_CODE_OF_KIND: dict[ErrorKind, int] = {
    ErrorKind.INVALID_ARGUMENT: code_pb2.INVALID_ARGUMENT,
    ErrorKind.NOT_FOUND: code_pb2.NOT_FOUND,
    ErrorKind.UNAUTHENTICATED: code_pb2.UNAUTHENTICATED,
    ErrorKind.PERMISSION_DENIED: code_pb2.PERMISSION_DENIED,
    ErrorKind.FAILED_PRECONDITION: code_pb2.FAILED_PRECONDITION,
    ErrorKind.RESOURCE_EXHAUSTED: code_pb2.RESOURCE_EXHAUSTED,
    ErrorKind.UNAVAILABLE: code_pb2.UNAVAILABLE,
    ErrorKind.ABORTED: code_pb2.ABORTED,
    ErrorKind.DEADLINE_EXCEEDED: code_pb2.DEADLINE_EXCEEDED,
    ErrorKind.CANCELLED: code_pb2.CANCELLED,
    ErrorKind.INTERNAL: code_pb2.INTERNAL,
}


class _Status(grpc.Status):
    """What `abort_with_status` wants: code, details and trailing metadata as attributes."""

    def __init__(
        self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str | bytes], ...]
    ) -> None:
        self.code = code
        self.details = details
        self.trailing_metadata = metadata


def status_proto(error: ServingError) -> status_pb2.Status:
    """The error as the message that travels in a call's trailing metadata."""
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata
    )
    status = status_pb2.Status(
        code=_CODE_OF_KIND[error.kind], message=error.message, details=[_packed(info)]
    )
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def status_of(
    error: ServingError, *, metadata: tuple[tuple[str, str | bytes], ...] = ()
) -> grpc.Status:
    """The error as a call ends with it, beside other trailing metadata."""
    rich = rpc_status.to_status(status_proto(error))
    metadata = (*metadata, *rich.trailing_metadata)
    if error.retry_after_s is not None:
        metadata = (*metadata, (RETRY_PUSHBACK_KEY, str(int(error.retry_after_s * 1000))))
    return _Status(rich.code, rich.details, metadata)


def error_of_call(error: grpc.aio.AioRpcError, *, peer: str) -> ServingError:
    """What a peer's failed call means here; `peer` is named where the peer itself gave no reason."""
    rich = rpc_status.from_call(error)
    if rich is not None:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        retry_after_s = None
        for detail in rich.details:
            detail.Unpack(info)
            if detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
        if info.domain == ERROR_DOMAIN:
            return error_of_reason(
                info.reason,
                rich.message,
                retry_after_s=retry_after_s,
                metadata=dict(info.metadata),
            )
    return _error_of_code(error.code(), error.details() or "", peer)


def error_of_reason(
    reason: str,
    message: str,
    *,
    retry_after_s: float | None = None,
    metadata: dict[str, str] | None = None,
) -> ServingError:
    """The error class that owns a reason; a reason of a newer peer becomes a plain `ServingError`."""
    cls = _class_of_reason(ServingError, reason) or ServingError
    error = cls(message, retry_after_s=retry_after_s, metadata=metadata)
    error.reason = reason
    return error


def _class_of_reason(root: type[ServingError], reason: str) -> type[ServingError] | None:
    if root.reason == reason:
        return root
    found = (_class_of_reason(cls, reason) for cls in root.__subclasses__())
    return next((cls for cls in found if cls is not None), None)


def _error_of_code(code: grpc.StatusCode, details: str, peer: str) -> ServingError:
    """gRPC itself ended the call: there is a code, and no reason of ours."""
    message = f"{peer}: {details or code.name}"
    match code:
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            # A server that stops cancels its calls; our own cancellation never comes this way.
            return WorkerLost(message)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlinePassed(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
            return InvalidRequest(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return CapacityExhausted(message)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(message)
        case grpc.StatusCode.ABORTED:
            return RequestAborted(message)
        case _:
            return ServingError(message, metadata={"code": code.name})


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
