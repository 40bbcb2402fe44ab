"""The commands of `dspark` and how one is run. Knows names and settings; each command is a module of its own, imported only
when it is asked for."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from common.config import load, quiet_native_logs
from common.errors import ConfigError
from services.cli.failures import EXIT_CONFIG, EXIT_OK, Failure
from services.cli.settings import AllSettings, ChatSettings, GenerateSettings

SERVER = ("config", "model", "log", "shutdown_s")
CLIENT = ("config", "endpoint", "api_key", "timeout_s", "sampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command; `services.cli.commands.<name>` has its `run(settings) -> exit code`."""

    summary: str
    shown: tuple[str, ...]
    """Settings and sections that its help lists."""
    flat: tuple[str, ...]
    """Those that have a flag without the section's name, too."""
    settings: type[AllSettings] = AllSettings


COMMANDS = {
    "up": Command(
        summary="router, prefill and decode workers as processes of this machine",
        shown=(*SERVER, "up", "router", "prefill", "decode", "engine"),
        flat=("up", "router.host", "router.port", "engine"),
    ),
    "demo": Command(
        summary="start everything, ask two questions, show the answers and their speed, stop",
        shown=(*SERVER, "up", "engine", "sampling"),
        flat=("up", "engine", "sampling"),
    ),
    "serve": Command(
        summary="router and one decode worker that computes prompts itself, in one process",
        shown=(*SERVER, "router", "decode", "engine"),
        flat=("router.host", "router.port", "engine", "decode"),
    ),
    "router": Command(summary="the router alone", shown=(*SERVER, "router"), flat=("router",)),
    "prefill": Command(
        summary="one prefill worker",
        shown=(*SERVER, "prefill", "engine"),
        flat=("prefill", "engine"),
    ),
    "decode": Command(
        summary="one decode worker", shown=(*SERVER, "decode", "engine"), flat=("decode", "engine")
    ),
    "generate": Command(
        summary="continue a text",
        shown=(*CLIENT, "text", "chat", "output"),
        flat=("sampling",),
        settings=GenerateSettings,
    ),
    "chat": Command(
        summary="talk to the model",
        shown=(*CLIENT, "system"),
        flat=("sampling",),
        settings=ChatSettings,
    ),
    "version": Command(summary="versions of this package and what it stands on", shown=(), flat=()),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its last line on standard error is the cause when it fails."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_overview())
        return EXIT_OK
    if name == "--version":
        name = "version"
    command = COMMANDS.get(name)
    if command is None:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else "dspark --help lists the commands"
        return _fail("dspark", f"{name} is not a command; {hint}", EXIT_CONFIG)
    program = f"dspark {name}"
    quiet_native_logs()
    try:
        settings = load(
            command.settings, rest, program=program, shown=command.shown, flat=command.flat
        )
        module = importlib.import_module(f"services.cli.commands.{name}")
        exit_code: int = module.run(settings)
    except ConfigError as error:
        return _fail(program, str(error), EXIT_CONFIG)
    except Failure as failure:
        return _fail(program, failure.cause, failure.exit_code)
    except KeyboardInterrupt:
        return 128 + 2
    return exit_code


def _overview() -> str:
    commands = "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    return (
        "usage: dspark COMMAND [FLAGS]\n\n"
        "Serves DeepSeek-V4 with DSpark speculative decoding: router, prefill and decode over gRPC.\n\n"
        f"commands:\n{commands}\n\n"
        "dspark COMMAND --help lists its flags. Every setting can be given as a flag, as DSPARK_SECTION__NAME in the\n"
        "environment or as a key of the YAML file named by --config; flags win over the environment, which wins over\n"
        "the file."
    )


def _fail(program: str, cause: str, exit_code: int) -> int:
    print(f"{program}: {cause}", file=sys.stderr)
    return exit_code
