"""The settings of the `bench` commands."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.config import CommaSeparated
from services.cli.settings import AllSettings


class TransferBenchSettings(AllSettings):
    engines: CommaSeparated = Field(
        default=("grpc", "nixl", "mooncake"), description="transfer engines to measure, as a,b"
    )
    sizes: CommaSeparated = Field(
        default=("4MiB", "64MiB", "256MiB"),
        description="bytes of one transfer; the largest is held once by the receiver and twice here",
    )
    ranges: CommaSeparated = Field(
        default=("1", "64", "1024"), description="equal pieces that a transfer is scattered into"
    )
    repeats: int = Field(default=5, ge=1, le=1000, description="of which the median counts")
    peer: str = Field(
        default="",
        description="host:port of a receiver on another machine; one is started here if not given",
    )
    serve: str = Field(
        default="",
        description="be the receiver at this host:port, an address that the other machine reaches; engines take further "
        "ports, and whoever reaches them can write, so for trusted networks only",
    )
    output: Literal["text", "json"] = "text"
