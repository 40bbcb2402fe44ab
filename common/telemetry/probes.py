"""What a process answers when it is asked whether it has started, may be used, and should be left running.

Knows times and reasons; not what makes a role busy. Asked by the admin port's threads, so that it answers while the event
loop is stuck, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Check = Callable[[], str | None]
"""One sentence that says what is wrong, None when nothing is."""

LOOP_STALL_S = 10.0
"""Without a turn of the event loop no call is answered; it turns many times a second while all is well."""
LOOP_DEAD_S = 60.0


def nothing_wrong() -> None:
    """A check that always passes."""
    return None


class Probes:
    """Three questions, each answered with None for yes or with the reason for no.

    A process that is still starting is alive however long that takes, and neither started nor ready. One that drains is
    alive and not ready.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        loop_stall_s: float = LOOP_STALL_S,
        loop_dead_s: float = LOOP_DEAD_S,
    ) -> None:
        self._clock = clock
        self._loop_stall_s = loop_stall_s
        self._loop_dead_s = loop_dead_s
        self._phase: str | None = "beginning"
        self._check_ready: Check = nothing_wrong
        self._check_alive: Check = nothing_wrong
        self._why_not_ready: str | None = None
        self._why_not_alive: str | None = None
        self._last_turn = 0.0

    def begin(self, phase: str) -> None:
        """The start has come to this part."""
        self._phase = phase

    def started(self, *, why_not_ready: Check, why_not_alive: Check = nothing_wrong) -> None:
        """The start is over; from now on the checks decide, and the event loop must `turn`."""
        self._check_ready, self._check_alive = why_not_ready, why_not_alive
        self.turn()
        self._phase = None

    def turn(self) -> None:
        """The event loop came by; it makes the checks, so that these need no locks."""
        self._why_not_ready, self._why_not_alive = self._check_ready(), self._check_alive()
        self._last_turn = self._clock()

    def startup(self) -> str | None:
        """Whether the start is over."""
        return None if self._phase is None else f"starting: {self._phase}"

    def readiness(self) -> str | None:
        """Whether requests are welcome."""
        return (
            self.startup()
            or self._why_not_alive
            or self._silence(self._loop_stall_s)
            or self._why_not_ready
        )

    def liveness(self) -> str | None:
        """Whether the process should be left running."""
        if self._phase is not None:
            return None
        return self._why_not_alive or self._silence(self._loop_dead_s)

    def _silence(self, limit_s: float) -> str | None:
        silent_s = self._clock() - self._last_turn
        if silent_s <= limit_s:
            return None
        return f"the event loop has not turned for {silent_s:.0f} s"
