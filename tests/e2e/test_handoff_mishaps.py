"""Hand-offs that go wrong under a router: it costs time, and not one token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.asking import Answer, Ask, ask_all, exactly
from tests.support.solo import Job, Solo
from tests.support.system import EventLoop, System, SystemOptions
from tests.support.transfer_engines import engine_params, transfer_config

pytestmark = pytest.mark.e2e

NUM_TOKENS = 16
PROMPT = (0, *((37 * i * i + 11 * i) % 1900 + 100 for i in range(1, 100)))
"""One chunk, and so one write: what goes wrong in which hand-off is known beforehand."""


def answers(system: System, num: int) -> list[Answer]:
    """To the same question, asked so many times in turn."""
    ask = Ask(prompt=PROMPT, stop=exactly(NUM_TOKENS))
    return [ask_all(system.address, [ask])[0] for _ in range(num)]


def replacements(given: Sequence[Answer]) -> list[int]:
    return [answer.completion.route.replacements for answer in given]


def faults_seen(caplog: pytest.LogCaptureFixture) -> list[str]:
    """As the engine that commits them says."""
    messages = [record.getMessage() for record in caplog.records]
    return [message.partition(": ")[2] for message in messages if ": fault " in message]


@pytest.fixture(scope="module")
def expected(plain: Solo) -> tuple[int, ...]:
    (output,) = plain.alone([Job(prompt=PROMPT, num_tokens=NUM_TOKENS)])
    return output.token_ids


@pytest.mark.parametrize("engine", engine_params("grpc", "nixl", "nixl-tcp", "mooncake"))
def test_failed_altered_and_doubled_writes_cost_no_token(
    servers: EventLoop,
    shipped_checkpoint: Path,
    engine: str,
    expected: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed write means another placement; other bytes are sent once more; other bytes twice mean another placement."""
    options = SystemOptions(
        checkpoint_dir=shipped_checkpoint,
        transfer=transfer_config(engine, monkeypatch),
        faults="fail:1, corrupt:3, duplicate:5, corrupt:6, corrupt:7",
        is_patient=True,
    )
    with System(servers, options).running() as system:
        given = answers(system, 5)
        assert {answer.token_ids for answer in given} == {expected}
        assert replacements(given) == [1, 0, 0, 1, 0]
        assert faults_seen(caplog) == [
            "fault fail in write 1",
            "fault corrupt in write 3",
            "fault duplicate in write 5",
            "fault corrupt in write 6",
            "fault corrupt in write 7",
        ]
        system.wait_at_rest()


@pytest.mark.parametrize("engine", engine_params("nixl"))
def test_a_write_that_hangs_or_is_never_said_to_have_arrived_is_given_up_in_time(
    servers: EventLoop,
    shipped_checkpoint: Path,
    engine: str,
    expected: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one goes on for a while after it was given up, and lands: its pages are nobody's until then."""
    options = SystemOptions(
        checkpoint_dir=shipped_checkpoint,
        transfer=transfer_config(engine, monkeypatch),
        faults="stall:1:2, drop:3",
        transfer_timeout_s=3.0,
        is_patient=True,
    )
    with System(servers, options).running() as system:
        given = answers(system, 3)
        assert {answer.token_ids for answer in given} == {expected}
        # A busy machine may need so long for a good write too.
        assert sum(replacements(given)) >= 2
        assert faults_seen(caplog) == ["fault stall in write 1", "fault drop in write 3"]
        system.wait_at_rest()
