"""The start-up timeline: what starts, how long each part took, a progress bar while weights load. Knows events and a
screen; starts nothing."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Never, TextIO

from tqdm import tqdm

from services.cli.events import Event, Failed, Phase, Progress, Ready, Report

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Start:
    """One process on its way up."""

    phase: str
    began: float
    phase_began: float
    progress: Progress = field(default_factory=lambda: Progress(done_bytes=0, total_bytes=0))


class Timeline:
    """Shows the start of several processes as it happens.

    At a terminal each finished phase is a line and loading weights is one bar over all processes; elsewhere each phase
    is a log record. Weights are loaded by threads, so any thread may report.
    """

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._is_screen = self._stream.isatty()
        self._began = clock()
        self._starts: dict[str, _Start] = {}
        self._bar: tqdm[Never] | None = None
        self._lock = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    def phase_of(self, name: str) -> str:
        """What the process was doing when last heard of."""
        return self._starts[name].phase

    def begin(self, name: str) -> None:
        """A process is being started."""
        now = self._clock()
        self._starts[name] = _Start(phase="process", began=now, phase_began=now)

    def reporter(self, name: str) -> Report:
        """Begin `name` and return where its events go."""
        self.begin(name)
        return lambda event: self.show(name, event)

    def show(self, name: str, event: Event) -> None:
        with self._lock:
            self._show(name, self._starts[name], event)

    def _show(self, name: str, start: _Start, event: Event) -> None:
        match event:
            case Progress():
                start.progress = event
                self._draw_bar()
            case Phase(name=phase):
                self._end_phase(name, start)
                start.phase = phase
                start.phase_began = self._clock()
            case Ready(address=address):
                self._end_phase(name, start)
                start.phase = "serving"
                self._line(name, "ready", self._clock() - start.began, f"at {address}")
            case Failed():
                self._close_bar()

    def _end_phase(self, name: str, start: _Start) -> None:
        seconds = self._clock() - start.phase_began
        size = ""
        if start.progress.total_bytes:
            megabytes = start.progress.total_bytes / 1e6
            size = f"{megabytes:.1f} MB, {megabytes / max(seconds, 1e-3):.0f} MB/s"
            self._draw_bar()
            start.progress = Progress(done_bytes=0, total_bytes=0)
            self._draw_bar()
        self._line(name, start.phase, seconds, size)

    def _line(self, name: str, phase: str, seconds: float, note: str) -> None:
        if self._is_screen:
            tqdm.write(f"  {name:<10} {phase:<10} {seconds:6.2f} s  {note}".rstrip(), self._stream)
        else:
            fields = {"child": name, "phase": phase, "seconds": round(seconds, 3)}
            logger.info("start-up", extra=fields | ({"note": note} if note else {}))

    def _draw_bar(self) -> None:
        """One bar over everything that loads now; gone when nothing does."""
        done = sum(start.progress.done_bytes for start in self._starts.values())
        total = sum(start.progress.total_bytes for start in self._starts.values())
        if not self._is_screen or not total:
            self._close_bar()
            return
        if self._bar is None:
            self._bar = tqdm(
                desc="  weights",
                total=total,
                initial=done,
                unit="B",
                unit_scale=True,
                leave=False,
                file=self._stream,
            )
        self._bar.total = total
        self._bar.n = done
        self._bar.refresh()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
