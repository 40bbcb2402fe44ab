"""What a starting process tells whoever waits for it, and how it is written to a pipe. Knows no process and no screen."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of the start began, and the one before it ended."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the current phase is, in bytes."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The process answers at this host:port."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The process is about to exit; `cause` is one sentence for people."""

    cause: str
    exit_code: int


Event = Phase | Progress | Ready | Failed
Report = Callable[[Event], None]

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Phase, Progress, Ready, Failed)}


def to_line(event: Event) -> bytes:
    """One JSON object and a newline."""
    return json.dumps({"event": type(event).__name__, **asdict(event)}).encode() + b"\n"


def from_line(line: bytes) -> Event:
    fields = json.loads(line)
    event: Event = _KINDS[fields.pop("event")](**fields)
    return event


def pipe_report(descriptor: int) -> Report:
    """Report into an open pipe; any thread may. A reader that is gone is nobody to report to."""

    def report(event: Event) -> None:
        try:
            os.write(descriptor, to_line(event))
        except BrokenPipeError:
            return

    return report
