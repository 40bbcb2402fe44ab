"""The whole system on the shipped checkpoint, and what it is compared with. Started once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.questions import Question, own_questions
from tests.support.solo import Solo
from tests.support.spans import Kept
from tests.support.system import EventLoop, System, SystemOptions

FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def servers() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def system(servers: EventLoop, shipped_checkpoint: Path) -> Iterator[System]:
    """Router, prefill and decode, speculating."""
    with System(servers, SystemOptions(checkpoint_dir=shipped_checkpoint)).running() as running:
        yield running


@pytest.fixture(scope="session")
def spans() -> Kept:
    """Of the traced system."""
    return Kept()


@pytest.fixture(scope="session")
def admin_key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the traced system."""
    file = tmp_path_factory.mktemp("admin") / "key"
    file.write_text("correct-horse")
    return file


@pytest.fixture(scope="session")
def traced(
    servers: EventLoop, shipped_checkpoint: Path, spans: Kept, admin_key_file: Path
) -> Iterator[System]:
    """Router, prefill and decode, whose spans are kept and whose engines may be profiled."""
    options = SystemOptions(checkpoint_dir=shipped_checkpoint, admin_key_file=admin_key_file)
    with System(servers, options, tracing=spans.tracing).running() as running:
        yield running


@pytest.fixture(scope="session")
def one_worker(servers: EventLoop, shipped_checkpoint: Path) -> Iterator[System]:
    """Router and one decode worker that computes prompts itself, as `dspark serve` runs them."""
    options = SystemOptions(checkpoint_dir=shipped_checkpoint, computes_prompts=True)
    with System(servers, options).running() as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that used a system, each page and slot is free again."""
    yield
    for name in ("system", "traced", "one_worker"):
        if name in request.fixturenames:
            request.getfixturevalue(name).wait_at_rest()


@pytest.fixture(scope="session")
def plain(shipped_checkpoint: Path) -> Solo:
    """One process, no drafts: what all output must equal."""
    return Solo(shipped_checkpoint, speculate=False)


@pytest.fixture(scope="session")
def speculating(shipped_checkpoint: Path) -> Solo:
    """One process that drafts for itself."""
    return Solo(shipped_checkpoint, speculate=True)


@pytest.fixture(scope="session")
def questions(shipped_checkpoint: Path) -> tuple[Question, ...]:
    """The project's own prompts as the model reads them, some cut to lengths around page borders."""
    return own_questions(shipped_checkpoint)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Says a measured figure at the end of the test run."""
    return request.config.stash.setdefault(FIGURES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    figures = terminalreporter.config.stash.get(FIGURES, [])
    if figures:
        terminalreporter.section("figures")
        for line in figures:
            terminalreporter.write_line(line)
