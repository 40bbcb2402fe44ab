"""Hand-offs that go wrong under a router: it costs time, and not one token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import Ask, ask_all, exactly
from tests.support.solo import Job, Solo
from tests.support.system import EventLoop, System, SystemOptions
from tests.support.transfer_engines import engine_params, transfer_config

pytestmark = pytest.mark.e2e

NUM_TOKENS = 16
PROMPT = (0, *((37 * i * i + 11 * i) % 1900 + 100 for i in range(1, 100)))
"""One chunk, and so one write: what goes wrong in which hand-off is known beforehand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """A system whose writes go wrong as planned is asked the same question again and again."""

    servers: EventLoop
    options: SystemOptions
    expected: tuple[int, ...]
    caplog: pytest.LogCaptureFixture

    @contextlib.contextmanager
    def asked(self, num: int, **changes: Any) -> Iterator[list[int]]:
        """How often each request was placed again; every answer is the expected one, and everything is free in the end."""
        ask = Ask(prompt=PROMPT, stop=exactly(NUM_TOKENS))
        with System(self.servers, replace(self.options, **changes)).running() as system:
            answers = [ask_all(system.address, [ask])[0] for _ in range(num)]
            assert {answer.token_ids for answer in answers} == {self.expected}
            yield [answer.completion.route.replacements for answer in answers]
            system.wait_at_rest()

    def faults_seen(self) -> list[str]:
        """As the engine that commits them says."""
        messages = [record.getMessage() for record in self.caplog.records]
        return [message.partition(": ")[2] for message in messages if ": fault " in message]


@pytest.fixture
def drill(
    servers: EventLoop,
    shipped_checkpoint: Path,
    engine: str,
    expected: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Drill:
    """With the transfer engine that a test is parametrised with."""
    options = SystemOptions(
        checkpoint_dir=shipped_checkpoint,
        transfer=transfer_config(engine, monkeypatch),
        is_patient=True,
    )
    return Drill(servers=servers, options=options, expected=expected, caplog=caplog)


@pytest.fixture(scope="module")
def expected(plain: Solo) -> tuple[int, ...]:
    (output,) = plain.alone([Job(prompt=PROMPT, num_tokens=NUM_TOKENS)])
    return output.token_ids


@pytest.mark.parametrize("engine", engine_params("grpc", "nixl", "nixl-tcp", "mooncake"))
def test_failed_altered_and_doubled_writes_cost_no_token(drill: Drill) -> None:
    """A failed write means another placement; other bytes are sent once more; other bytes twice mean another placement."""
    faults = "fail:1, corrupt:3, duplicate:5, corrupt:6, corrupt:7"
    with drill.asked(5, faults=faults) as replacements:
        assert replacements == [1, 0, 0, 1, 0]
        assert drill.faults_seen() == [
            "fault fail in write 1",
            "fault corrupt in write 3",
            "fault duplicate in write 5",
            "fault corrupt in write 6",
            "fault corrupt in write 7",
        ]


@pytest.mark.parametrize("engine", engine_params("nixl"))
def test_a_write_that_hangs_or_is_never_said_to_have_arrived_is_given_up_in_time(
    drill: Drill,
) -> None:
    """The first one goes on for a while after it was given up, and lands: its pages are nobody's until then."""
    faults = "stall:1:2, drop:3"
    with drill.asked(3, faults=faults, transfer_timeout_s=3.0) as replacements:
        # A busy machine may need so long for a good write too.
        assert sum(replacements) >= 2
        assert drill.faults_seen() == ["fault stall in write 1", "fault drop in write 3"]
