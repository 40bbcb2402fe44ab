"""Between the event loop and the engine's thread: commands one way, reports the other. Knows their order; no requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from common.engine.request import Request, StepListener, StepReport
from common.types import RequestId


class Steps(Protocol):
    """What the crossing needs of an engine; `Engine` is one. Called on the engine thread only."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request, /) -> None: ...
    def remove(self, request_id: RequestId, /) -> Request | None: ...
    def commit(self, request_id: RequestId, round_number: int, /) -> None: ...
    def step(self, listener: StepListener | None = None, /) -> StepReport: ...
    def keep_alive(self) -> None: ...
    def close(self) -> None: ...


Command = Callable[[Steps], None]
Report = TypeVar("Report")
Loop = Callable[[Steps, "Crossing[Report]"], None]
"""A service's engine loop: runs on the engine thread until the crossing closes."""


class Crossing(Generic[Report]):
    """The engine thread's side: where a loop takes commands and leaves reports."""

    def __init__(
        self, emit: Callable[[Report], None], clock: Callable[[], float], idle_s: float
    ) -> None:
        self.emit = emit
        """Hand a report to the event loop; returns at once."""
        self._clock = clock
        self._idle_s = idle_s
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._is_open = True
        self._busy_since: float | None = None

    def take_commands(
        self, *, wait: bool, idle: Callable[[], None] = lambda: None
    ) -> list[Command] | None:
        """All commands since the last call, in order; None once closed.

        With `wait`, sleeps until there is one, and calls `idle` every `idle_s` meanwhile.
        """
        self._busy_since = None
        while wait and not self._sleep():
            idle()
        with self._changed:
            commands = list(self._commands)
            self._commands.clear()
            self._busy_since = self._clock()
            return commands if self._is_open else None

    def _sleep(self) -> bool:
        """Wait for a command or the end; False when neither came within `idle_s`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._commands) or not self._is_open, self._idle_s
            )

    def put(self, command: Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify()

    @property
    def busy_s(self) -> float:
        """Seconds since the engine last came by for commands; 0 while it sleeps."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since
