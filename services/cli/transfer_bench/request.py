"""What is to be measured. Knows names and patterns; needs no torch, so that a wrong one is refused at once."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError
from common.transfer.config import TransferConfig
from services.cli.transfer_bench.patterns import Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Raises ConfigError when it names an engine that does not exist."""

    engines: tuple[str, ...]
    patterns: tuple[Pattern, ...]
    repeats: int

    def __post_init__(self) -> None:
        for name in self.engines:
            TransferConfig.named(name)
            if name == "auto":
                raise ConfigError("engines are measured by name; auto is none")
