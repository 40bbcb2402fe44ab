"""Stop signals and the end of a parent, as two events. Knows the operating system; not what is stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading

logger = logging.getLogger(__name__)


class StopSignals:
    """`stop` is set by the first SIGTERM or SIGINT, `hurry` by the second. Made inside the loop that will react."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._received, number)

    def watch_parent(self) -> None:
        """Take the end of standard input for a first signal: it is a pipe that only the parent can close."""
        threading.Thread(target=self._wait_for_parent, name="parent-watch", daemon=True).start()

    def _received(self, number: signal.Signals) -> None:
        if self.stop.is_set():
            self.hurry.set()
            return
        logger.info("%s received: finishing; once more ends at once", signal.Signals(number).name)
        self.stop.set()

    def _wait_for_parent(self) -> None:
        # On a thread of its own: nothing is ever written, and a busy loop must not delay noticing the end.
        while os.read(sys.stdin.fileno(), 1):
            pass
        self._loop.call_soon_threadsafe(self._parent_ended)

    def _parent_ended(self) -> None:
        logger.warning("the parent process is gone; finishing")
        self.stop.set()
