"""Exit codes and causes."""

from __future__ import annotations

import errno

import pytest

from common.errors import CheckpointError, ConfigError, EngineFailed, NoReadyWorkers
from services.cli.failures import Failure, death_of, failure_of


class OutOfMemoryError(RuntimeError):
    """Stands for the device libraries' class of this name."""


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ConfigError("x"), 2),
        (CheckpointError("x"), 3),
        (MemoryError(), 4),
        (OutOfMemoryError("tried to allocate 2 GiB"), 4),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            ),
            4,
        ),
        (NoReadyWorkers("x"), 5),
        (OSError(errno.EADDRINUSE, "in use"), 5),
        (ConnectionRefusedError("x"), 5),
        (RuntimeError("x"), 1),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(error: Exception, exit_code: int) -> None:
    assert failure_of(error).exit_code == exit_code


def test_a_cause_is_one_line() -> None:
    assert failure_of(RuntimeError("two\n  lines")).cause == "RuntimeError: two lines"
    assert failure_of(MemoryError()).cause.startswith(
        "memory ran out (MemoryError); lower num_slots"
    )


def test_a_missing_package_is_named_with_the_remedy() -> None:
    cause = failure_of(ModuleNotFoundError("No module named 'torch'", name="torch")).cause
    assert cause.startswith("the package 'torch' is not installed; pip install")


def test_a_failed_engine_is_told_by_what_made_it_fail() -> None:
    failed = EngineFailed("the engine failed: OutOfMemoryError: 2 GiB")
    failed.__cause__ = OutOfMemoryError("2 GiB")
    failure = failure_of(failed)
    assert failure.exit_code == 4
    assert failure.cause.startswith("the engine failed: memory ran out (2 GiB); lower num_slots")


def test_a_failure_stays_itself() -> None:
    failure = Failure("x", exit_code=4)
    assert failure_of(failure) is failure


def test_a_signal_is_named_with_its_usual_reason() -> None:
    assert death_of(-9) == "was ended by SIGKILL (by hand, or by the system when memory ran out)"
    assert death_of(-4).startswith("was ended by SIGILL (the processor lacks")
    assert death_of(3) == "ended with exit code 3"
