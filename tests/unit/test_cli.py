"""The `dspark` command: what it accepts, how quickly it answers, what it says when it fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common.config import load
from services.cli.main import COMMANDS, main

ARGUMENTS = {
    "up": ["--prefills", "2", "--decodes", "2", "--port", "0", "--no-speculate", "--model", "x"],
    "demo": ["--max-tokens", "8", "--draft-length", "5"],
    "serve": ["--port", "0", "--num-slots", "4", "--dtype", "bfloat16"],
    "router": ["--port", "0", "--prefill-workers", "a:1,b:2", "--decode-workers", "c:3"],
    "prefill": ["--host", "0.0.0.0", "--port", "0", "--threads", "2"],
    "decode": ["--port", "0", "--computes-prompts", "--num-pages", "64", "--log.format", "json"],
    "generate": ["once upon", "--temperature", "0.8", "--seed", "7", "--stop", "a", "--chat"],
    "chat": ["--endpoint", "host:1", "--system", "be brief", "--timeout-s", "3"],
    "checkpoint inspect": ["dspark-tiny", "--output", "json"],
    "checkpoint validate": ["dspark-tiny", "--contract", "upstream-123", "--deep"],
    "checkpoint convert": ["dspark-tiny", "/tmp/x", "--to", "fp8-fp4", "--shard-gb", "2"],
    "checkpoint plan": [
        "dspark-tiny",
        "--dp",
        "4",
        "--tp",
        "4",
        "--ep",
        "16",
        "--cache",
        "official",
    ],
    "bench transfer": [
        "--engines",
        "grpc,nixl",
        "--sizes",
        "4MiB",
        "--ranges",
        "1",
        "--peer",
        "a:1",
    ],
    "profile": [
        "host:1",
        "--steps",
        "3",
        "--seconds",
        "2",
        "--key-file",
        "/tmp/key",
        "--trace",
        "t",
    ],
    "version": [],
}


def test_every_command_has_an_example_here() -> None:
    assert ARGUMENTS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_parses_its_flags(name: str) -> None:
    command = COMMANDS[name]
    settings = load(
        command.settings,
        ARGUMENTS[name],
        program=name,
        shown=command.shown,
        flat=command.flat,
    )
    assert isinstance(settings, command.settings)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*name.split(), "--help"])
    assert exit_.value.code == 0
    assert f"usage: dspark {name}" in capsys.readouterr().out


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_an_unknown_command_is_refused_with_the_likely_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["rooter"]) == 2
    assert capsys.readouterr().err == "dspark: rooter is not a command; did you mean router?\n"


def test_a_wrong_flag_ends_in_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--prefils", "2"]) == 2
    assert capsys.readouterr().err == (
        "dspark up: --prefils is not a flag of this command; did you mean --prefills?\n"
    )


@pytest.mark.usefixtures("restored_logging")
def test_a_missing_checkpoint_ends_in_one_line_and_exit_code_3(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["up", "--model", "/nowhere", "--log.level", "error"]) == 3
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith("dspark up: there is no checkpoint '/nowhere'")


def test_a_router_that_is_not_there_ends_in_one_line_and_exit_code_5(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Port 1 of this machine: nothing listens there, and nothing is sent anywhere else.
    assert main(["generate", "x", "--endpoint", "127.0.0.1:1", "--timeout-s", "5"]) == 5
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert "is the router running?" in error[0]


def test_help_needs_neither_torch_nor_grpc() -> None:
    """`dspark --help` in under a second depends on it."""
    code = "import sys, services.cli; print({'torch', 'grpc', 'tokenizers', 'numba'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout == "set()\n"
