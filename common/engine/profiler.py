"""What the engine does in some of its steps, as a trace for Perfetto. Knows the engine's thread; no requests."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from common.engine.thread import EngineThread
from common.errors import CapacityExhausted, InvalidRequest, NothingRecorded

MAX_STEPS = 1000
MAX_SECONDS = 60.0
MAX_TRACE_BYTES = 256 * 1024 * 1024
"""Gzipped. A step of a large model is thousands of events of some hundred bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recording that has ended."""

    num_steps: int
    """As many as were asked for, and what the engine did until it heard that they were enough."""
    seconds: float
    trace: bytes
    """Gzipped JSON of Chrome's trace format."""


class StepProfiler:
    """Records the engine of one worker, one recording at a time."""

    def __init__(self, engine: EngineThread[Any]) -> None:
        self._engine = engine
        self._is_recording = False

    async def record(self, *, max_steps: int, max_seconds: float) -> Recording:
        """Record until so many steps have ended or so much time has passed, whichever comes first.

        Raises InvalidRequest for bounds that are none, CapacityExhausted when a recording goes on or its trace is too
        large to be sent, NothingRecorded when no step ended.
        """
        if not 1 <= max_steps <= MAX_STEPS:
            raise InvalidRequest(f"max_steps is {max_steps}; give 1 to {MAX_STEPS}")
        if not 0 < max_seconds <= MAX_SECONDS:
            raise InvalidRequest(
                f"max_seconds is {max_seconds}; give a value above 0, at most {MAX_SECONDS:.0f}"
            )
        if self._is_recording:
            raise CapacityExhausted("a recording goes on already", retry_after_s=max_seconds)
        self._is_recording = True
        try:
            return await self._record(max_steps, max_seconds)
        finally:
            self._is_recording = False

    async def _record(self, max_steps: int, max_seconds: float) -> Recording:
        profiler = torch.profiler.profile(activities=_activities(), record_shapes=True)
        engine = self._engine

        # It records the thread that starts it, and must be stopped by the same; between two steps no count is half done.
        def start() -> int:
            profiler.start()
            return engine.num_steps

        def stop() -> int:
            profiler.stop()
            return engine.num_steps

        began = time.monotonic()
        try:
            num_before, began = await engine.call(start), time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max_seconds):
                    while engine.num_steps - num_before < max_steps:
                        await engine.wait_reported()
        finally:
            # Even if this was given up before the start came to its turn: it will.
            seconds = time.monotonic() - began
            num_after = await engine.call(stop)
        num_steps = num_after - num_before
        if num_steps == 0:
            raise NothingRecorded(
                f"the engine made no step in {max_seconds} s; send it requests meanwhile"
            )
        trace = await asyncio.to_thread(_trace_of, profiler)
        if len(trace) > MAX_TRACE_BYTES:
            raise CapacityExhausted(
                f"the trace of {num_steps} steps has {len(trace)} bytes; record fewer",
                metadata={"num_bytes": str(len(trace)), "limit": str(MAX_TRACE_BYTES)},
            )
        return Recording(num_steps=num_steps, seconds=seconds, trace=trace)


def _activities() -> list[ProfilerActivity]:
    """The host's, and the device's where there is one that the profiler knows."""
    has_cuda = torch.cuda.is_available()
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_cuda else [])]


def _trace_of(profiler: torch.profiler.profile) -> bytes:
    with tempfile.TemporaryDirectory(prefix="dspark-profile-") as folder:
        path = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()
