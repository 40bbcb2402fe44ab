"""Help for writes that come in: NIXL without its own thread moves bytes over TCP only while somebody looks. Knows when to
look; not what is written."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

RECEIVE_PERIOD_S = 0.001
"""Between two looks at what is written to us: a write that needs our help is late by this much."""
BUSY_LOOK_S = 0.000_1
"""A look that takes longer has brought bytes in, so there may be more: the next one follows at once."""
IDLE_PERIOD_S = 0.1
"""Between two looks when nothing is expected: a write that both sides gave up still comes to its end."""


class NixlReceiver:
    """Looks for what peers write to us, on a thread that exists once something was expected."""

    def __init__(self, agent: Any, errors: tuple[type[Exception], ...]) -> None:
        self._agent = agent
        self._errors = errors
        self._lock = threading.Lock()
        self._num_expected = 0
        self._changed = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def receive(self) -> Callable[[], None]:
        has_stopped = False
        self._count(1)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nixl-receive", daemon=True)
            self._thread.start()

        def stop() -> None:
            nonlocal has_stopped
            if not has_stopped:
                has_stopped = True
                self._count(-1)

        return stop

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()
        if self._thread is not None:
            self._thread.join()

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_expected += change
            self._changed.set()

    def _run(self) -> None:
        while not self._is_closed:
            began = time.perf_counter()
            try:
                self._agent.get_new_notifs()
            except self._errors as error:
                logger.debug("nixl: a peer is gone: %s", error)
            if not self._num_expected:
                self._changed.wait(IDLE_PERIOD_S)
                self._changed.clear()
            elif time.perf_counter() - began < BUSY_LOOK_S:
                time.sleep(RECEIVE_PERIOD_S)
