"""The one crossing between asyncio and the thread that owns all torch state. Knows the engine's verbs; no services.

Commands go in through a queue, reports come out through the event loop. The engine thread sleeps while there is
neither a command nor work.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from common.engine.request import OnComputed, Request, StepReport
from common.errors import WorkerLost
from common.types import RequestId

logger = logging.getLogger(__name__)

NICENESS = 10
"""Of the engine thread, and of the threads that its matrix products start: a CPU that is wanted by all goes to the event
loops first, whose few milliseconds others wait for."""

IDLE_S = 1.0
"""How often an engine that sleeps is asked to keep its other ranks awake; so soon it notices that one is gone."""


class Steps(Protocol):
    """What the crossing needs of an engine; `Engine` is one. Called on the engine thread only."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request, /) -> None: ...
    def remove(self, request_id: RequestId, /) -> Request | None: ...
    def commit(self, request_id: RequestId, round_number: int, /) -> None: ...
    def step(self, on_computed: OnComputed | None = None, /) -> StepReport: ...
    def keep_alive(self) -> None: ...
    def close(self) -> None: ...


Command = Callable[[Steps], None]
Report = TypeVar("Report")
Result = TypeVar("Result")
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

    async def stop(self) -> None:
        """End the loop after its current step and wait for it."""
        self._crossing.close()
        if self._thread.is_alive():
            await self._ended.wait()

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
        """Take a request back; its slot and pages may be reused once this returns. None when it was not there."""
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
