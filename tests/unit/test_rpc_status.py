"""Errors keep their kind, reason, numbers and patience on the wire."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from common import errors
from common.errors import CapacityExhausted, ErrorKind, ServingError
from common.rpc.status import RETRY_PUSHBACK_KEY, error_of_call, error_of_reason, status_of


def all_errors(root: type[ServingError] = ServingError) -> list[type[ServingError]]:
    return [root, *(cls for sub in root.__subclasses__() for cls in all_errors(sub))]


OURS = [cls for cls in all_errors() if cls.__module__ == errors.__name__]


def over_the_wire(error: ServingError) -> ServingError:
    status = status_of(error)
    trailer = grpc.aio.Metadata(*(status.trailing_metadata or ()))
    call = grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailer, details=status.details)
    return error_of_call(call, peer="peer")


def from_grpc(code: grpc.StatusCode, details: str) -> ServingError:
    call = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
    return error_of_call(call, peer="host:1")


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_an_error_arrives_as_what_it_was(cls: type[ServingError]) -> None:
    sent = cls("so it is", retry_after_s=1.5, metadata={"limit": "7"})
    arrived = over_the_wire(sent)
    assert type(arrived) is cls
    assert arrived.message == "so it is"
    assert arrived.retry_after_s == 1.5
    assert arrived.metadata == {"limit": "7"}


def test_reasons_are_unique() -> None:
    reasons = [cls.reason for cls in OURS]
    assert len(set(reasons)) == len(reasons)


def test_every_kind_has_a_code() -> None:
    for kind in ErrorKind:
        error = ServingError("x")
        error.kind = kind
        assert status_of(error).code.name.lower() == kind.value


def test_an_error_that_will_not_pass_has_no_retry_delay() -> None:
    assert over_the_wire(CapacityExhausted("full")).retry_after_s is None


def test_grpc_clients_are_told_how_long_to_wait() -> None:
    status = status_of(CapacityExhausted("full", retry_after_s=0.25))
    assert (RETRY_PUSHBACK_KEY, "250") in tuple(status.trailing_metadata or ())


def test_a_reason_of_a_newer_peer_is_kept() -> None:
    error = error_of_reason("FROM_THE_FUTURE", "well")
    assert (error.kind, error.reason) == (ErrorKind.INTERNAL, "FROM_THE_FUTURE")


@pytest.mark.parametrize(
    ("code", "details", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", "WORKER_LOST"),
        (grpc.StatusCode.CANCELLED, "server stopped", "WORKER_LOST"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", "DEADLINE_EXCEEDED"),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Received message larger than max (5 vs. 4)",
            "INVALID_PARAMETER",
        ),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "no memory", "CAPACITY_EXHAUSTED"),
        (grpc.StatusCode.UNIMPLEMENTED, "method not found", "INTERNAL"),
    ],
)
def test_what_grpc_itself_says_is_understood(
    code: grpc.StatusCode, details: str, reason: str
) -> None:
    error = from_grpc(code, details)
    assert error.reason == reason
    assert "host:1" in error.message
