from __future__ import annotations

import asyncio
import threading
from unittest import mock

import pytest

from common.engine import thread as engine_thread
from common.engine.crossing import Crossing, Steps
from common.engine.request import Request, Role, StepListener, StepReport
from common.engine.thread import EngineThread
from common.errors import WorkerLost
from common.types import RequestId, SamplingParams
from services.decode.loop import run_decode_loop
from tests.support.waiting import WAIT_S


def a_request(name: str) -> Request:
    return Request(
        request_id=RequestId(name),
        epoch=0,
        role=Role.GENERATE,
        tokens=[1],
        max_length=10,
        sampling=SamplingParams(),
        slot=0,
        block_table=[0],
    )


class ScriptedEngine:
    """Has one step of work per request, and waits in it for a permit."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.todo: list[str] = []
        self.permits = threading.Semaphore(1000)
        self.is_stepping = threading.Event()
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.crash: Exception | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.todo)

    def add(self, request: Request) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(f"add {request.request_id}")
        self.requests[request.request_id] = request
        self.todo.append(request.request_id)

    def remove(self, request_id: RequestId) -> Request | None:
        self.calls.append(f"remove {request_id}")
        return self.requests.pop(request_id, None)

    def keep_alive(self) -> None:
        """One rank needs none."""

    def close(self) -> None:
        """Nothing is held."""

    def commit(self, request_id: RequestId, round_number: int) -> None:
        self.calls.append(f"commit {request_id} {round_number}")

    def step(self, listener: StepListener | None = None) -> StepReport:
        self.is_stepping.set()
        self.permits.acquire()
        if self.crash is not None:
            raise self.crash
        self.calls.append(f"step {self.todo.pop(0)}")
        return StepReport(rounds=(), progressed=(), num_rows=1, seconds=0.0, phase_seconds={})


class Worker:
    """The thread with what it told the event loop."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.reports: asyncio.Queue[StepReport] = asyncio.Queue()
        self.crashes: asyncio.Queue[Exception] = asyncio.Queue()
        self.thread = EngineThread(
            engine,
            run_decode_loop,
            on_report=self.reports.put_nowait,
            on_crash=self.crashes.put_nowait,
        )
        self.thread.start()


async def test_commands_and_steps_run_in_order_on_the_engines_own_thread() -> None:
    engine = ScriptedEngine()
    worker = Worker(engine)
    request = a_request("a")
    worker.thread.add(request)
    await asyncio.wait_for(worker.reports.get(), WAIT_S)
    worker.thread.commit(request.request_id, 1)
    assert await worker.thread.remove(request.request_id) is request
    assert await worker.thread.remove(request.request_id) is None
    await worker.thread.stop()
    assert engine.calls == ["add a", "step a", "commit a 1", "remove a", "remove a"]
    assert engine.threads == {"engine"}


async def test_a_removed_request_is_out_of_use_when_remove_returns() -> None:
    engine = ScriptedEngine()
    engine.permits = threading.Semaphore(0)
    worker = Worker(engine)
    worker.thread.add(a_request("a"))
    assert await asyncio.to_thread(engine.is_stepping.wait, WAIT_S)
    removal = asyncio.create_task(worker.thread.remove(RequestId("a")))
    await asyncio.sleep(0)
    assert not removal.done()  # the step that may write its pages is still under way
    engine.permits.release(10)
    assert await removal is not None
    assert engine.calls == ["add a", "step a", "remove a"]
    # The report of that step came before, so nothing is heard of the request afterwards.
    assert worker.reports.qsize() == 1
    await worker.thread.stop()


async def test_an_engine_without_work_sleeps_until_told() -> None:
    engine = ScriptedEngine()
    worker = Worker(engine)
    assert await worker.thread.remove(RequestId("nobody")) is None
    assert worker.thread.busy_s >= 0.0
    await worker.thread.stop()
    assert engine.calls == ["remove nobody"]


async def test_a_crash_is_told_once_and_ends_everything_that_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = ScriptedEngine()
    engine.permits = threading.Semaphore(0)
    worker = Worker(engine)
    worker.thread.add(a_request("a"))
    assert await asyncio.to_thread(engine.is_stepping.wait, WAIT_S)
    removal = asyncio.create_task(worker.thread.remove(RequestId("a")))
    await asyncio.sleep(0)
    engine.crash = RuntimeError("out of memory")
    engine.permits.release(1)
    assert await removal is None
    assert str(await asyncio.wait_for(worker.crashes.get(), WAIT_S)) == "out of memory"
    assert worker.thread.has_crashed
    assert "the engine failed" in caplog.text
    with pytest.raises(WorkerLost):
        worker.thread.add(a_request("b"))
    assert await worker.thread.remove(RequestId("b")) is None
    await worker.thread.stop()
    assert worker.crashes.empty()


async def test_a_lost_rank_is_one_line_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    engine.crash = WorkerLost("rank 5 of 8 was killed by SIGKILL")
    worker = Worker(engine)
    worker.thread.add(a_request("a"))
    assert await asyncio.wait_for(worker.crashes.get(), WAIT_S) is engine.crash
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert line.getMessage().endswith("fails with it: rank 5 of 8 was killed by SIGKILL")
    assert line.exc_info is None
    await worker.thread.stop()


async def test_an_engine_that_cannot_be_closed_has_ended_all_the_same() -> None:
    engine = ScriptedEngine()
    worker = Worker(engine)
    with mock.patch.object(engine, "close", side_effect=RuntimeError("no group to leave")):
        await asyncio.wait_for(worker.thread.stop(), WAIT_S)
    assert await worker.thread.remove(RequestId("a")) is None


def test_a_step_that_does_not_end_shows_as_busy() -> None:
    now = 5.0
    crossing: Crossing[StepReport] = Crossing(lambda report: None, lambda: now, 10.0)
    assert crossing.busy_s == 0.0
    commands = crossing.take_commands(wait=False)
    assert commands == []
    now = 12.5
    assert crossing.busy_s == 7.5
    crossing.close()
    assert crossing.take_commands(wait=True) is None


def test_a_sleeping_engine_is_not_busy() -> None:
    """The bug this guards against: an idle worker that was reported as stalled after half a minute."""
    crossing: Crossing[StepReport] = Crossing(lambda report: None, lambda: 99.0, 10.0)
    is_taken = threading.Event()

    def engine_side(steps: Steps | None) -> None:
        crossing.take_commands(wait=True)
        is_taken.set()

    thread = threading.Thread(target=engine_side, args=(None,))
    thread.start()
    assert crossing.busy_s == 0.0
    crossing.put(lambda engine: None)
    assert is_taken.wait(WAIT_S)
    thread.join()


async def test_a_call_runs_between_two_steps_on_the_engines_thread() -> None:
    engine = ScriptedEngine()
    engine.permits = threading.Semaphore(0)
    worker = Worker(engine)
    worker.thread.add(a_request("a"))
    assert await asyncio.to_thread(engine.is_stepping.wait, WAIT_S)
    calling = asyncio.create_task(worker.thread.call(lambda: threading.current_thread().name))
    reported = asyncio.create_task(worker.thread.wait_reported())
    await asyncio.sleep(0)
    assert not calling.done()
    engine.permits.release(1)
    assert await asyncio.wait_for(calling, WAIT_S) == "engine"
    assert worker.reports.qsize() == 1
    await asyncio.wait_for(reported, WAIT_S)
    await worker.thread.stop()


async def test_a_call_that_fails_is_its_callers_and_the_engine_goes_on() -> None:
    worker = Worker(ScriptedEngine())

    def fail() -> None:
        raise OSError("no room for a trace")

    with pytest.raises(OSError, match="no room for a trace"):
        await worker.thread.call(fail)
    assert await worker.thread.call(lambda: 3) == 3
    await worker.thread.stop()
    with pytest.raises(WorkerLost):
        await worker.thread.call(lambda: 3)


async def test_a_crash_ends_calls_that_wait() -> None:
    engine = ScriptedEngine()
    engine.permits = threading.Semaphore(0)
    worker = Worker(engine)
    worker.thread.add(a_request("a"))
    assert await asyncio.to_thread(engine.is_stepping.wait, WAIT_S)
    calling = asyncio.create_task(worker.thread.call(lambda: 3))
    await asyncio.sleep(0)
    engine.crash = RuntimeError("out of memory")
    engine.permits.release(1)
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(calling, WAIT_S)
    await asyncio.wait_for(worker.thread.wait_crashed(), WAIT_S)
    await worker.thread.stop()


async def test_a_step_without_an_end_is_left_and_whoever_waits_for_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ending a worker whose device does not answer once waited for ever, and a test behind a closed gate with it."""
    monkeypatch.setattr(engine_thread, "STOP_TIMEOUT_S", 0.05)
    engine = ScriptedEngine()
    engine.permits = threading.Semaphore(0)
    worker = Worker(engine)
    worker.thread.add(a_request("a"))
    assert await asyncio.to_thread(engine.is_stepping.wait, WAIT_S)
    removal = asyncio.create_task(worker.thread.remove(RequestId("a")))
    call = asyncio.create_task(worker.thread.call(lambda: 3))
    await asyncio.wait_for(worker.thread.stop(), WAIT_S)
    assert await asyncio.wait_for(removal, WAIT_S) is None
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(call, WAIT_S)
    assert "the engine's step has not ended in 0.05 s and is left" in caplog.text
    assert not worker.thread.has_crashed
    engine.permits.release(10)
    await asyncio.to_thread(worker.thread._thread.join, WAIT_S)
