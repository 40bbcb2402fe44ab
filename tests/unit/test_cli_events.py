"""Reports of a starting process, over the pipe and on the screen."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path

import pytest

from common.telemetry.logging import extra_fields
from services.cli.events import (
    Event,
    Failed,
    Phase,
    Progress,
    Ready,
    from_line,
    pipe_report,
    to_line,
)
from services.cli.last_words import MAX_BYTES, with_last_words
from services.cli.timeline import Timeline

EVENTS: list[Event] = [
    Phase(name="weights"),
    Progress(done_bytes=3, total_bytes=2**40),
    Ready(address="127.0.0.1:5"),
    Failed(cause="the “cause”\nof it", exit_code=3),
]


class Clock:
    """A clock that is told the time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_survives_the_pipe_as_one_line(event: Event) -> None:
    line = to_line(event)
    assert line.count(b"\n") == 1
    assert from_line(line) == event


def test_a_reader_that_is_gone_does_not_hurt_the_reporting_process() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    pipe_report(writing)(EVENTS[0])
    os.close(writing)


def test_each_phase_is_a_line_with_its_own_seconds() -> None:
    clock, screen = Clock(), Screen()
    timeline = Timeline(screen, clock=clock)
    report = timeline.reporter("decode-0")
    clock.now = 1.5
    report(Phase(name="weights"))
    assert timeline.phase_of("decode-0") == "weights"
    clock.now = 2.0
    report(Progress(done_bytes=20_000_000, total_bytes=20_000_000))
    report(Phase(name="engine"))
    clock.now = 2.25
    report(Ready(address="127.0.0.1:5"))
    lines = [line.split() for line in screen.getvalue().replace("\r", "\n").splitlines()]
    assert ["decode-0", "process", "1.50", "s"] in lines
    assert ["decode-0", "weights", "0.50", "s", "20.0", "MB,", "40", "MB/s"] in lines
    assert ["decode-0", "engine", "0.25", "s"] in lines
    assert ["decode-0", "ready", "2.25", "s", "at", "127.0.0.1:5"] in lines
    assert timeline.phase_of("decode-0") == "serving"


def test_the_bar_covers_all_processes_that_load() -> None:
    screen = Screen()
    timeline = Timeline(screen, clock=Clock())
    for name in ("prefill-0", "decode-0"):
        timeline.reporter(name)(Progress(done_bytes=25, total_bytes=100))
    assert "50.0/200" in screen.getvalue()


def test_without_a_screen_phases_are_log_records_and_there_is_no_bar(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = io.StringIO()
    timeline = Timeline(stream, clock=Clock())
    report = timeline.reporter("decode-0")
    with caplog.at_level(logging.INFO):
        report(Progress(done_bytes=1, total_bytes=2))
        report(Phase(name="weights"))
    assert stream.getvalue() == ""
    (record,) = caplog.records
    assert extra_fields(record) == {
        "child": "decode-0",
        "phase": "process",
        "seconds": 0.0,
        "note": "0.0 MB, 0 MB/s",
    }


def test_a_failure_leaves_one_paragraph_with_the_phase_and_the_cause(tmp_path: Path) -> None:
    clock, log, told = Clock(), tmp_path / "log", list[Event]()
    report = with_last_words(told.append, log, "decode", clock)
    events: list[Event] = [
        Phase(name="import"),
        Phase(name="weights"),
        Failed(cause="the disk is gone", exit_code=3),
    ]
    clock.now = 12.4
    for event in events:
        report(event)
    assert told == events
    assert log.read_text() == "dspark decode failed after 12 s (weights): the disk is gone\n"


def test_a_process_that_ends_well_leaves_no_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    report = with_last_words(lambda event: None, log, "decode", Clock())
    report(Ready(address="127.0.0.1:5"))
    assert not log.exists()


def test_last_words_are_cut_to_what_is_shown_and_never_hide_the_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, told = tmp_path / "log", list[Event]()
    long = Failed(cause="x" * 2 * MAX_BYTES, exit_code=1)
    with_last_words(told.append, log, "decode", Clock())(long)
    assert log.stat().st_size == MAX_BYTES
    with_last_words(told.append, tmp_path / "no" / "log", "decode", Clock())(long)
    assert told == [long, long]
    assert "cannot write the cause to" in caplog.text
