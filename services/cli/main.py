"""The commands of `dspark` and how one is run. Knows names and settings; each command is a module of its own, imported only
when it is asked for."""

from __future__ import annotations

import difflib
import importlib
import os
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from common.config import load, load_devices_when_chosen, quiet_native_logs
from common.errors import ConfigError
from services.cli.bench_settings import TransferBenchSettings
from services.cli.checkpoint_settings import (
    CheckpointSettings,
    ConvertSettings,
    PlanSettings,
    ValidateSettings,
)
from services.cli.failures import EXIT_CONFIG, EXIT_OK, Failure
from services.cli.settings import AllSettings, ChatSettings, GenerateSettings, ProfileSettings

SERVER = ("config", "model", "log", "tracing", "admin", "shutdown_s", "termination_log")
CHECKPOINT = ("config", "checkpoint", "output")
CLIENT = ("config", "endpoint", "api_key", "timeout_s", "sampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command; `services.cli.commands.<name>` has its `run(settings) -> exit code`, spaces as underscores."""

    summary: str
    shown: tuple[str, ...]
    """Settings and sections that its help lists."""
    flat: tuple[str, ...]
    """Those that have a flag without the section's name, too."""
    settings: type[AllSettings] = AllSettings


COMMANDS = {
    "up": Command(
        summary="router, prefill and decode workers as processes of this machine",
        shown=(*SERVER, "up", "router", "prefill", "decode", "engine", "transfer"),
        flat=("up", "router.host", "router.port", "engine", "prefill.faults"),
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
        shown=(*SERVER, "prefill", "engine", "transfer"),
        flat=("prefill", "engine"),
    ),
    "decode": Command(
        summary="one decode worker",
        shown=(*SERVER, "decode", "engine", "transfer"),
        flat=("decode", "engine"),
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
    "checkpoint inspect": Command(
        summary="what a checkpoint is: format, size, drafter",
        shown=CHECKPOINT,
        flat=(),
        settings=CheckpointSettings,
    ),
    "checkpoint validate": Command(
        summary="is everything there that serving needs, and intact",
        shown=(*CHECKPOINT, "contract", "deep", "record_digests"),
        flat=(),
        settings=ValidateSettings,
    ),
    "checkpoint convert": Command(
        summary="the same model in another format",
        shown=(*CHECKPOINT, "target", "to", "shard_gb"),
        flat=(),
        settings=ConvertSettings,
    ),
    "checkpoint plan": Command(
        summary="memory per rank on a mesh, and what fits",
        shown=(
            *CHECKPOINT,
            *("dp", "tp", "ep", "device_gib", "utilization", "cache", "weights"),
            *("draft_length", "context_length"),
        ),
        flat=(),
        settings=PlanSettings,
    ),
    "bench transfer": Command(
        summary="what share of the link each transfer engine reaches, and what limits it",
        shown=("config", "engines", "sizes", "ranges", "repeats", "peer", "serve", "output"),
        flat=(),
        settings=TransferBenchSettings,
    ),
    "profile": Command(
        summary="record what a worker's engine does, for Perfetto",
        shown=("config", "worker", "steps", "seconds", "trace", "admin"),
        flat=("admin.key_file",),
        settings=ProfileSettings,
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
    if rest and f"{name} {rest[0]}" in COMMANDS:
        name = f"{name} {rest.pop(0)}"
    command = COMMANDS.get(name)
    if command is None:
        return _fail("dspark", _unknown(name), EXIT_CONFIG)
    program = f"dspark {name}"
    quiet_native_logs()
    load_devices_when_chosen()
    try:
        settings = load(
            command.settings, rest, program=program, shown=command.shown, flat=command.flat
        )
        module = importlib.import_module(f"services.cli.commands.{name.replace(' ', '_')}")
        exit_code: int = module.run(settings)
        sys.stdout.flush()
    except ConfigError as error:
        return _fail(program, str(error), EXIT_CONFIG)
    except Failure as failure:
        return _fail(program, failure.cause, failure.exit_code)
    except KeyboardInterrupt:
        return 128 + 2
    except BrokenPipeError:
        if _is_read():
            raise
        # `head` has seen enough. What is left must go somewhere when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    return exit_code


def _is_read() -> bool:
    """Whether anybody still takes what is printed; it was another pipe that broke then."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors are told unasked
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(
        f"  {name:<{width}} {command.summary}" for name, command in COMMANDS.items()
    )
    return (
        "usage: dspark COMMAND [FLAGS]\n\n"
        "Serves DeepSeek-V4 with DSpark speculative decoding: router, prefill and decode over gRPC.\n\n"
        f"commands:\n{commands}\n\n"
        "dspark COMMAND --help lists its flags. Every setting can be given as a flag, as DSPARK_SECTION__NAME in the\n"
        "environment or as a key of the YAML file named by --config; flags win over the environment, which wins over\n"
        "the file."
    )


def _unknown(name: str) -> str:
    parts = [full.removeprefix(f"{name} ") for full in COMMANDS if full.startswith(f"{name} ")]
    if parts:
        return f"{name} needs one of {', '.join(parts)}"
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]}?" if close else "dspark --help lists the commands"
    return f"{name} is not a command; {hint}"


def _fail(program: str, cause: str, exit_code: int) -> int:
    print(f"{program}: {cause}", file=sys.stderr)
    return exit_code
