"""The one crossing between asyncio and the thread that owns all torch state. Knows the engine's verbs; no services.

Commands go in through a queue, reports come out through the event loop. The engine thread sleeps while there is
neither a command nor work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from common.engine.crossing import Crossing, Loop, Report, Steps
from common.engine.request import Request
from common.errors import WorkerLost
from common.types import RequestId

logger = logging.getLogger(__name__)

NICENESS = 10
"""Of the engine thread, and of the threads that its matrix products start: a CPU that is wanted by all goes to the event
loops first, whose few milliseconds others wait for."""

STOP_TIMEOUT_S = 10.0
"""For the step that runs when a worker ends; its process does not wait for a device that does not answer."""

IDLE_S = 1.0
"""How often an engine that sleeps is asked to keep its other ranks awake; so soon it notices that one is gone."""


Result = TypeVar("Result")


class EngineThread(Generic[Report]):
    """Runs a loop over an engine on a thread of its own. Every method is called from the event loop.

    A loop that raises is over: `on_crash` is called once, on the event loop, and later commands raise WorkerLost.
    `ends_step` tells the last report of a step from those before it.
    """

    def __init__(
        self,
        engine: Steps,
        loop: Loop[Report],
        *,
        on_report: Callable[[Report], None],
        on_crash: Callable[[Exception], None],
        ends_step: Callable[[Report], bool] = lambda report: True,
        clock: Callable[[], float] = time.monotonic,
        idle_s: float = IDLE_S,
    ) -> None:
        self._engine = engine
        self._ends_step = ends_step
        self._loop = loop
        self._on_report = on_report
        self._on_crash = on_crash
        self._events = asyncio.get_running_loop()
        self._crossing: Crossing[Report] = Crossing(self._emit, clock, idle_s)
        self._removals: set[asyncio.Future[Request | None]] = set()
        self._calls: set[asyncio.Future[Any]] = set()
        self._has_reported = asyncio.Event()
        self.num_steps = 0
        """Steps that have ended; counted on the engine's thread."""
        self._ended = asyncio.Event()
        self._has_crashed = asyncio.Event()
        self.crash: Exception | None = None
        """What ended the loop, when it did not end because it was told to."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self, *, after: Awaitable[object] | None = None) -> None:
        """End the loop after its current step, and after what still needs it; wait for both, `STOP_TIMEOUT_S` at most.

        A step that takes longer is left to end with the process, which must be about to: whoever waits for the engine
        is told that it has ended, and nothing may use its memory any more.
        """
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                if after is not None:
                    await asyncio.shield(after)
                self._crossing.close()
                if self._thread.is_alive():
                    await self._ended.wait()
        except TimeoutError:
            logger.error("the engine's step has not ended in %s s and is left", STOP_TIMEOUT_S)
            self._crossing.close()
            self._end(None)

    @property
    def has_crashed(self) -> bool:
        return self.crash is not None

    async def wait_crashed(self) -> None:
        """Return when the engine has failed; never, when it does not."""
        await self._has_crashed.wait()

    @property
    def busy_s(self) -> float:
        """Seconds that the current step has taken so far; 0 while the engine sleeps. For health."""
        return self._crossing.busy_s

    def add(self, request: Request) -> None:
        """Give a request to the engine, which owns it from now on. Raises WorkerLost after a crash."""
        if self.crash is not None:
            raise WorkerLost("the engine of this worker has failed")
        self._crossing.put(lambda engine: engine.add(request))

    def commit(self, request_id: RequestId, round_number: int) -> None:
        """Tell the engine that rounds up to `round_number` were committed."""
        self._crossing.put(lambda engine: engine.commit(request_id, round_number))

    async def remove(self, request_id: RequestId) -> Request | None:
        """Take a request back; its slot and pages may be reused once this returns. None when it was not there.

        Takes as long as the current step, for nothing else makes the memory safe to reuse, so only what frees memory waits
        here. A step without an end fails the liveness probe; `stop` ends this wait.
        """
        if self._ended.is_set():
            return None
        removed: asyncio.Future[Request | None] = self._events.create_future()
        self._removals.add(removed)

        def command(engine: Steps) -> None:
            request = engine.remove(request_id)
            self._events.call_soon_threadsafe(_resolve, removed, request)

        self._crossing.put(command)
        try:
            return await removed
        finally:
            self._removals.discard(removed)

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run something on the engine's thread, between two steps. Raises what it raises, and WorkerLost after a crash."""
        if self._ended.is_set():
            raise WorkerLost("the engine of this worker has ended")
        called: asyncio.Future[Result] = self._events.create_future()
        self._calls.add(called)
        self._crossing.put(lambda _: _answer(function, called, self._events))
        try:
            return await called
        finally:
            self._calls.discard(called)

    async def wait_reported(self) -> None:
        """Return at the next report."""
        await self._has_reported.wait()

    def _run(self) -> None:
        crash: Exception | None = None
        _be_modest()
        try:
            self._loop(self._engine, self._crossing)
        except WorkerLost as error:
            # Says which rank went and why; the trace says only how that was noticed.
            logger.error(
                "the engine failed; every request of this worker fails with it: %s", error.message
            )
            crash = error
        except Exception as error:
            logger.exception("the engine failed; every request of this worker fails with it")
            crash = error
        try:
            self._engine.close()
        except Exception:
            logger.exception("the engine cannot be closed; it ends with this process")
        with contextlib.suppress(RuntimeError):  # the event loop ended first: this step was left
            self._events.call_soon_threadsafe(self._end, crash)

    def _emit(self, report: Report) -> None:
        self.num_steps += self._ends_step(report)
        self._events.call_soon_threadsafe(self._reported, report)

    def _reported(self, report: Report) -> None:
        self._has_reported.set()
        self._has_reported = asyncio.Event()
        self._on_report(report)

    def _end(self, crash: Exception | None) -> None:
        self.crash = crash
        self._ended.set()
        for removed in list(self._removals):
            # Nothing runs any more, so whatever was to be removed is out of use.
            _resolve(removed, None)
        for called in list(self._calls):
            if not called.done():
                called.set_exception(WorkerLost("the engine of this worker has ended"))
        if crash is not None:
            self._has_crashed.set()
            self._on_crash(crash)


def _resolve(removed: asyncio.Future[Request | None], request: Request | None) -> None:
    if not removed.done():
        removed.set_result(request)


def _answer(
    function: Callable[[], Result],
    called: asyncio.Future[Result],
    events: asyncio.AbstractEventLoop,
) -> None:
    """On the engine's thread. A function that fails is its caller's affair and no reason to end the engine."""
    try:
        result = function()
    except Exception as error:
        events.call_soon_threadsafe(_refuse, called, error)
    else:
        events.call_soon_threadsafe(_fulfil, called, result)


def _fulfil(called: asyncio.Future[Result], result: Result) -> None:
    if not called.done():
        called.set_result(result)


def _refuse(called: asyncio.Future[Result], error: Exception) -> None:
    if not called.done():
        called.set_exception(error)


def _be_modest() -> None:
    """Only Linux knows priorities of single threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
