"""`dspark up`, `serve` and `demo` as a user meets them: real processes, the shipped checkpoint, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

import dspark
from tests.support.collector import Collector, collecting
from tests.support.processes import wait_health

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for children in /proc"),
]

READY_S = 120.0
STOP_S = 60.0
CRASHING_ENGINE = Path(__file__).parents[1] / "support" / "crashing_engine"
READY_LINE = re.compile(r"^ready: dspark-tiny at (\S+) after")


class Command:
    """One running `dspark` command, and the children it has."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", *arguments],
            env=None if environment is None else os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> str:
        """Read standard output to the ready line; returns the router's address."""
        assert self.process.stdout is not None
        with self._killed_after(READY_S):
            for line in self.process.stdout:
                if found := READY_LINE.match(line):
                    return found[1]
        raise AssertionError(f"never ready: {self.process.communicate()[1][-2000:]}")

    def end(self, number: signal.Signals | None = None, within_s: float = STOP_S) -> Ending:
        """Send a signal, or none, and wait for the end."""
        if number is not None:
            self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=within_s)
        return Ending(self.process.returncode, output, errors)

    def children(self) -> list[int]:
        return [pid for pid in _processes() if _parent(pid) == self.process.pid]

    def child(self, command: str) -> int:
        """The process that runs `dspark <command>`."""
        (pid,) = [pid for pid in self.children() if command in _command_line(pid)]
        return pid

    @contextlib.contextmanager
    def _killed_after(self, seconds: float) -> Iterator[None]:
        alarm = threading.Timer(seconds, self.process.kill)
        alarm.start()
        try:
            yield
        finally:
            alarm.cancel()


class Ending:
    """How a command ended."""

    def __init__(self, exit_code: int, output: str, errors: str) -> None:
        self.exit_code = exit_code
        self.output = output
        self.causes = [line for line in errors.splitlines() if line.startswith("dspark ")]
        self.errors = errors


@pytest.fixture
def command() -> Iterator[list[Command]]:
    """Commands that a test starts go in here and are gone when it ends, whatever happened."""
    running: list[Command] = []
    yield running
    for one in running:
        for pid in one.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        one.process.kill()
        one.process.communicate()


def start(command: list[Command], *arguments: str) -> Command:
    command.append(Command(*arguments))
    return command[-1]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


def test_up_starts_three_processes_answers_and_stops_without_leaving_one(
    command: list[Command], collector: Collector
) -> None:
    up = start(command, "up", "--port", "0", "--tracing.endpoint", collector.endpoint)
    address = up.wait_ready()
    children = up.children()
    assert len(children) == 3
    with dspark.Client(address, timeout=60.0) as client:
        completion = client.generate(
            "def add(a, b):",
            sampling=dspark.SamplingParams(temperature=0.0),
            stop=dspark.StopParams(max_tokens=12),
        )
        assert completion.usage.completion_tokens > 0
        assert completion.route.prefill_worker
        assert completion.route.transfer_engine
    flags = ("def add(a, b):", "--endpoint", address, "--max-tokens", "12")
    assert start(command, "generate", *flags).end().output == completion.text + "\n"
    *rounds, last = start(command, "generate", *flags, "--output", "json").end().output.splitlines()
    assert "".join(json.loads(line)["text"] for line in rounds) == completion.text
    assert json.loads(last)["completion"]["finish_reason"] == completion.finish_reason
    ending = up.end(signal.SIGTERM)
    assert (ending.exit_code, ending.causes) == (0, [])
    assert not any(map(_is_running, children))
    assert ending.errors.count("request ended") == 3
    assert "def add" not in ending.errors, "a prompt is in the log"
    # Each of the three requests is one trace across the three processes.
    assert set(collector.spans) == {"dspark-router", "dspark-prefill", "dspark-decode"}
    traces = [{trace_id for trace_id, _ in spans} for spans in collector.spans.values()]
    assert len(traces[0]) == 3
    assert traces[0] == traces[1] == traces[2]


def test_ctrl_c_stops_up_cleanly_while_it_answers(command: list[Command]) -> None:
    up = start(command, "up", "--port", "0", "--shutdown-s", "60")
    address = up.wait_ready()
    children = up.children()
    with (
        dspark.Client(address, timeout=60.0) as client,
        client.generate(
            "def add(a, b):",
            stop=dspark.StopParams(max_tokens=64, ignore_eos=True),
            stream=True,
        ) as stream,
    ):
        next(stream)
        up.process.send_signal(signal.SIGINT)
        # A request that runs is finished, not cut.
        assert stream.read().finish_reason == "length"
        assert len(stream.token_ids) == 64
    ending = up.end()
    assert (ending.exit_code, ending.causes) == (0, [])
    assert not any(map(_is_running, children))


def test_a_second_signal_ends_requests_that_the_first_let_run(command: list[Command]) -> None:
    up = start(command, "up", "--port", "0", "--shutdown-s", "300")
    address = up.wait_ready()
    children = up.children()
    with (
        dspark.Client(address, timeout=60.0) as client,
        client.generate("x", stop=dspark.StopParams(ignore_eos=True), stream=True) as stream,
    ):
        next(stream)
        up.process.send_signal(signal.SIGTERM)
        # A second one that comes before the first was taken is none.
        wait_health(address, health_pb2.HealthCheckResponse.NOT_SERVING)
        ending = up.end(signal.SIGTERM)
        with pytest.raises(dspark.DSparkError):
            stream.read()
    assert (ending.exit_code, ending.causes) == (0, [])
    assert not any(map(_is_running, children))


def test_a_child_that_is_killed_ends_everything_with_one_line_that_names_it(
    command: list[Command],
) -> None:
    up = start(command, "up", "--port", "0")
    up.wait_ready()
    children = up.children()
    os.kill(up.child("decode"), signal.SIGKILL)
    ending = up.end()
    assert ending.exit_code == 1
    (cause,) = ending.causes
    assert re.match(r"dspark up: decode-0 \(process \d+\) was ended by SIGKILL", cause)
    assert ending.errors.splitlines()[-1] == cause
    assert not any(map(_is_running, children))


def test_an_engine_that_fails_ends_everything_with_its_cause_on_the_last_line_and_in_the_termination_log(
    command: list[Command], tmp_path: Path
) -> None:
    """A worker whose engine is gone used to stay, never ready again, and nobody was told why."""
    log = tmp_path / "termination-log"
    environment = {"PYTHONPATH": str(CRASHING_ENGINE)}
    up = Command("up", "--port", "0", "--termination-log", str(log), environment=environment)
    command.append(up)
    address = up.wait_ready()
    with dspark.Client(address, timeout=60.0) as client, pytest.raises(dspark.DSparkError):
        client.generate("def add(a, b):")
    ending = up.end()
    assert ending.exit_code == 1
    (cause,) = ending.causes
    failed = r"the engine failed: RuntimeError: a kernel failed in step 1"
    assert re.match(rf"dspark up: decode-0 \(process \d+\) failed: {failed}", cause)
    assert ending.errors.splitlines()[-1] == cause
    assert re.fullmatch(
        rf"dspark decode failed after \d+ s \(serving\): {failed}\n", log.read_text()
    )


def test_a_child_that_fails_to_start_is_the_cause_in_its_own_words(command: list[Command]) -> None:
    up = start(command, "up", "--port", "0", "--decode.max-step-rows", "2")
    ending = up.end(within_s=READY_S)
    assert ending.exit_code == 2
    (cause,) = ending.causes
    assert "decode-0" in cause
    assert "max_step_rows is 2; one proposal needs" in cause


def test_children_end_when_up_is_killed(command: list[Command]) -> None:
    up = start(command, "up", "--port", "0")
    up.wait_ready()
    handles = [os.pidfd_open(pid) for pid in up.children()]
    assert len(handles) == 3
    up.process.kill()
    for handle in handles:
        # A process's handle becomes readable when it has ended.
        assert select.select([handle], [], [], STOP_S)[0], "a child outlived its parent"
        os.close(handle)


def test_a_port_in_use_is_said_before_anything_starts(command: list[Command]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ending = start(command, "up", "--port", str(port)).end()
    assert ending.exit_code == 5
    assert ending.causes == [
        f"dspark up: cannot listen on 127.0.0.1:{port} (Address already in use); "
        "stop what uses it or choose another with --port"
    ]


def test_serve_answers_from_one_process(command: list[Command]) -> None:
    serve = start(command, "serve", "--port", "0")
    with dspark.Client(serve.wait_ready(), timeout=60.0) as client:
        completion = client.generate("def add(a, b):", stop=dspark.StopParams(max_tokens=12))
    assert completion.route.prefill_worker == ""
    assert serve.children() == []
    ending = serve.end(signal.SIGTERM)
    assert (ending.exit_code, ending.causes) == (0, [])


def test_the_demo_answers_two_questions_with_figures_and_ends_well(command: list[Command]) -> None:
    demo = start(command, "demo", "--max-tokens", "24")
    ending = demo.end(within_s=READY_S + STOP_S)
    assert ending.exit_code == 0, ending.errors
    assert "> What is the capital of France?" in ending.output
    figures = re.findall(r"tokens/s · accepted length (\d+\.\d\d)", ending.output)
    assert len(figures) == 2
    assert all(float(length) >= 1.0 for length in figures)


def _processes() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def _parent(pid: int) -> int | None:
    try:
        # The name in brackets may hold anything; what follows its last bracket is state and parent.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
