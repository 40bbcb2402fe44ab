"""Errors that tell a caller what to do. Knows reasons and kinds; `rpc/status.py` knows status codes.

A `ServingError` means the caller is wrong, the world is full, or a peer failed. A broken invariant is an
`AssertionError` and reaches no caller in words.
"""

from __future__ import annotations

import enum


class ErrorKind(enum.Enum):
    """What a caller can do about it; one gRPC status each."""

    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"
    FAILED_PRECONDITION = "failed_precondition"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    UNAVAILABLE = "unavailable"
    ABORTED = "aborted"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class ServingError(Exception):
    """Root of the errors that cross a service border.

    `reason` is stable and meant for programs, the message for people, `metadata` holds the numbers of the message.
    `retry_after_s` is set when the same request may succeed later.
    """

    kind: ErrorKind = ErrorKind.INTERNAL
    reason: str = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.metadata = metadata or {}


class InvalidRequest(ServingError):
    """A field of the request is malformed or out of range."""

    kind = ErrorKind.INVALID_ARGUMENT
    reason = "INVALID_PARAMETER"


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus max_tokens do not fit the model's context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class ModelNotFound(ServingError):
    """The request names a model that is not served here."""

    kind = ErrorKind.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


class RequestNotFound(ServingError):
    """The message names a request or reservation that does not exist, or exists in a newer epoch."""

    kind = ErrorKind.NOT_FOUND
    reason = "REQUEST_NOT_FOUND"


class LeaseEnded(ServingError):
    """The finished state that a lease kept is gone; computing it again is the way on."""

    kind = ErrorKind.NOT_FOUND
    reason = "LEASE_ENDED"


class DuplicateRequest(ServingError):
    """A live request has this id already."""

    kind = ErrorKind.INVALID_ARGUMENT
    reason = "DUPLICATE_REQUEST"


class CapabilityRefused(ServingError):
    """The capability token does not belong to the reservation and epoch that it came with."""

    kind = ErrorKind.UNAUTHENTICATED
    reason = "CAPABILITY_REFUSED"


class AdminKeyRequired(ServingError):
    """Only who has the admin key may ask this."""

    kind = ErrorKind.PERMISSION_DENIED
    reason = "ADMIN_KEY_REQUIRED"


class NothingRecorded(ServingError):
    """A recording ended before there was anything to record."""

    kind = ErrorKind.FAILED_PRECONDITION
    reason = "NOTHING_RECORDED"


class ContractMismatch(ServingError):
    """Two sides of a hand-off disagree; the message names the field and both values."""

    kind = ErrorKind.FAILED_PRECONDITION
    reason = "CONTRACT_MISMATCH"


class PairUnknown(ServingError):
    """The two sides of a hand-off have not met in these generations, or one has forgotten the other; meet again."""

    kind = ErrorKind.FAILED_PRECONDITION
    reason = "PAIR_UNKNOWN"


class CapacityExhausted(ServingError):
    """No room for the request now."""

    kind = ErrorKind.RESOURCE_EXHAUSTED
    reason = "CAPACITY_EXHAUSTED"


class QueueFull(CapacityExhausted):
    """Too many requests wait already."""

    reason = "QUEUE_FULL"


class NoReadyWorkers(ServingError):
    """No worker of a role takes requests."""

    kind = ErrorKind.UNAVAILABLE
    reason = "NO_READY_WORKERS"


class Draining(ServingError):
    """This process finishes its requests and takes no new ones."""

    kind = ErrorKind.UNAVAILABLE
    reason = "DRAINING"


class TransferFailed(ServingError):
    """Cache state did not arrive whole."""

    kind = ErrorKind.UNAVAILABLE
    reason = "KV_TRANSFER_FAILED"


class WorkerLost(ServingError):
    """A worker died or stopped answering while it had the request."""

    kind = ErrorKind.UNAVAILABLE
    reason = "WORKER_LOST"


class ReplicasDiffer(WorkerLost):
    """Ranks of a worker hold unlike copies of a request's cache: nothing that they compute can be trusted."""

    reason = "REPLICAS_DIFFER"


class EngineFailed(ServingError):
    """The engine of this process is gone, and only another process brings a new one."""

    reason = "ENGINE_ERROR"


class StreamInterrupted(ServingError):
    """The request could not be continued after tokens had been shown."""

    kind = ErrorKind.ABORTED
    reason = "STREAM_INTERRUPTED"


class DeadlinePassed(ServingError):
    """The caller's deadline passed."""

    kind = ErrorKind.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class RequestAborted(ServingError):
    """The request was aborted before it finished."""

    kind = ErrorKind.CANCELLED
    reason = "ABORTED"


class CheckpointError(ServingError):
    """A checkpoint is incomplete or does not match its configuration."""

    kind = ErrorKind.FAILED_PRECONDITION
    reason = "CHECKPOINT_INVALID"


class ConfigError(ServingError):
    """The configuration cannot work; the message says which value to change."""

    kind = ErrorKind.INVALID_ARGUMENT
    reason = "CONFIG_INVALID"
