"""Bytes per second of the transfer engines, by the tool that users have, and beside bare NIXL. Knows commands and their JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.report import Value

TIMEOUT_S = 600.0


def run_transfer(repeats: int) -> dict[str, Value]:
    """Figures by name."""
    said = _run("services.cli", "bench", "transfer", "--repeats", str(repeats), "--output", "json")
    return {
        **{f"transfer.{name}": value for name, value in said["figures"].items()},
        **{f"transfer.{engine}.limit": sentence for engine, sentence in said["limits"].items()},
        **{f"transfer.{engine}.missing": why for engine, why in said["missing"].items()},
        **(_bare_nixl(repeats) if "nixl" not in said["missing"] else {}),
    }


def _bare_nixl(repeats: int) -> dict[str, Value]:
    figures = _run("benchmarks.bare_nixl", "--repeats", str(repeats))
    return {f"transfer.{name}": value for name, value in figures.items()}


def _run(module: str, *arguments: str) -> Any:
    """What a program says. A process of its own: libraries of engines may crash when theirs ends."""
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        check=True,
        timeout=TIMEOUT_S,
    )
    return json.loads(result.stdout)
