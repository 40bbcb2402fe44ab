"""`dspark version`: what is installed here."""

from __future__ import annotations

import platform
from importlib import metadata

from services.cli.failures import EXIT_OK
from services.cli.settings import AllSettings

DISTRIBUTIONS = ("dspark-serving", "dspark-client", "torch", "grpcio", "protobuf")


def run(settings: AllSettings) -> int:
    for name in DISTRIBUTIONS:
        print(f"{name:<15} {_version(name)}")
    print(f"{'python':<15} {platform.python_version()} on {platform.platform()}")
    return EXIT_OK


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
