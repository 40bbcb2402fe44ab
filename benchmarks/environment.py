"""Where figures come from: the machine and the versions. Knows nothing of what is measured."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "numba", "grpcio", "transformers")


def environment() -> dict[str, str | int | float]:
    """Flat facts about this machine; load is that of the moment."""
    return {
        "environment.cpu": _cpu_name(),
        "environment.cores": len(os.sched_getaffinity(0)),
        "environment.load_1min": round(os.getloadavg()[0], 2),
        "environment.system": f"{platform.system()} {platform.machine()}",
        "environment.python": platform.python_version(),
        **{f"environment.{package}": _version(package) for package in PACKAGES},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
