"""Why a process ended, as an exit code and one sentence with a cause and a remedy. Knows errors; prints nothing."""

from __future__ import annotations

import errno
import signal

from common.errors import (
    CheckpointError,
    ConfigError,
    EngineFailed,
    NoReadyWorkers,
    ServingError,
)

EXIT_OK = 0
EXIT_OTHER = 1
EXIT_CONFIG = 2
EXIT_MODEL = 3
EXIT_MEMORY = 4
EXIT_NETWORK = 5

_SIGNAL_HINTS = {
    signal.SIGKILL: "by hand, or by the system when memory ran out",
    signal.SIGILL: "the processor lacks an instruction that a library was built for",
    signal.SIGSEGV: "a native library failed",
    signal.SIGBUS: "shared memory may be full; look at /dev/shm",
    signal.SIGTERM: "somebody asked it to stop",
}


class Failure(Exception):
    """A command cannot go on; `cause` is one sentence, the remedy included."""

    def __init__(self, cause: str, *, exit_code: int) -> None:
        super().__init__(cause)
        self.cause = cause
        self.exit_code = exit_code


def failure_of(error: BaseException) -> Failure:
    """The exit code and the sentence for an error that ended a command."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, Failure):
        return error
    if isinstance(error, EngineFailed) and error.__cause__ is not None:
        crash = error.__cause__
        return Failure(f"the engine failed: {_cause(crash)}", exit_code=_exit_code(crash))
    return Failure(_cause(error), exit_code=_exit_code(error))


def death_of(exit_status: int) -> str:
    """How a process ended whose `returncode` this is."""
    if exit_status >= 0:
        return f"ended with exit code {exit_status}"
    number = signal.Signals(-exit_status)
    hint = _SIGNAL_HINTS.get(number)
    return f"was ended by {number.name}" + (f" ({hint})" if hint else "")


def _exit_code(error: BaseException) -> int:
    if _is_out_of_memory(error):
        return EXIT_MEMORY
    if isinstance(error, CheckpointError):
        return EXIT_MODEL
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return EXIT_NETWORK
    if isinstance(error, NoReadyWorkers | ConnectionError):
        return EXIT_NETWORK
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    return EXIT_OTHER


def _cause(error: BaseException) -> str:
    if _is_out_of_memory(error):
        return f"memory ran out ({_one_line(error)}); lower num_slots or num_pages, or give the process more memory"
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name!r} is not installed; pip install 'dspark-serving[engine]' brings it"
    if isinstance(error, ServingError):
        return _one_line(error)
    return f"{type(error).__name__}: {_one_line(error)}"


def _is_out_of_memory(error: BaseException) -> bool:
    # Device libraries have a class of their own, and the CPU's allocator only words; torch is not imported to ask.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "allocate memory" in str(error))
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
