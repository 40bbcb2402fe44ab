"""Bytes per second of the transfer engines, by the tool that users have. Knows its command line and its JSON."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.report import Value

TIMEOUT_S = 600.0


def run_transfer(repeats: int) -> dict[str, Value]:
    """Its figures by name. A process of its own: libraries of engines may crash when theirs ends."""
    command = (sys.executable, "-m", "services.cli", "bench", "transfer")
    flags = ("--repeats", str(repeats), "--output", "json")
    result = subprocess.run(
        [*command, *flags], stdout=subprocess.PIPE, check=True, timeout=TIMEOUT_S
    )
    said = json.loads(result.stdout)
    return {
        **{f"transfer.{name}": value for name, value in said["figures"].items()},
        **{f"transfer.{engine}.limit": sentence for engine, sentence in said["limits"].items()},
        **{f"transfer.{engine}.missing": why for engine, why in said["missing"].items()},
    }
