"""Which failures are worth another placement."""

from __future__ import annotations

import pytest

from common.errors import (
    CapabilityRefused,
    CapacityExhausted,
    ContractMismatch,
    Draining,
    InvalidRequest,
    RequestAborted,
    RequestNotFound,
    ServingError,
    TransferFailed,
    WorkerLost,
)
from services.router.replacement import Failures


def note(
    failures: Failures, error: ServingError, *, now: float = 0.0, max_attempts: int = 3
) -> None:
    failures.note(error, frozenset({"worker"}), now=now, max_attempts=max_attempts, patience_s=10.0)


@pytest.mark.parametrize(
    "error",
    [
        WorkerLost("x"),
        TransferFailed("x"),
        Draining("x"),
        ServingError("x"),
        RequestAborted("x"),
        RequestNotFound("x"),
        ContractMismatch("x"),
    ],
    ids=lambda error: error.reason,
)
def test_a_workers_fault_is_worth_another_placement(error: ServingError) -> None:
    failures = Failures()
    note(failures, error)
    assert failures.blame == {"worker": 2}


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("x"), CapabilityRefused("x")],
    ids=lambda error: error.reason,
)
def test_what_will_fail_again_is_not(error: ServingError) -> None:
    with pytest.raises(type(error)):
        note(Failures(), error)


def test_a_handoff_fails_between_two_workers() -> None:
    failures = Failures()
    between = frozenset({"prefill", "decode"})
    failures.note(TransferFailed("x"), between, now=0.0, max_attempts=3, patience_s=10.0)
    assert failures.blame == {"prefill": 1, "decode": 1}
    assert failures.was_between("prefill", "decode")
    assert not failures.was_between("prefill", "other decode")


def test_a_worker_that_failed_alone_says_nothing_about_pairs() -> None:
    failures = Failures()
    note(failures, WorkerLost("x"))
    assert not failures.was_between("worker", "decode")


def test_the_last_attempt_ends_in_its_own_error() -> None:
    failures = Failures()
    note(failures, WorkerLost("first"))
    note(failures, WorkerLost("second"))
    with pytest.raises(TransferFailed, match="third"):
        note(failures, TransferFailed("third"))


def test_overload_is_waited_out_and_counts_no_attempt() -> None:
    failures = Failures()
    for now in range(10):
        note(failures, CapacityExhausted("full"), now=float(now))
    note(failures, WorkerLost("x"), now=9.5)
    with pytest.raises(CapacityExhausted):
        note(failures, CapacityExhausted("full"), now=10.5)
