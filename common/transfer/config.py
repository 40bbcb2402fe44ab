"""What a worker is told about moving bytes. Parsed at the edge, checked here, never changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from common.errors import ConfigError

EngineChoice = Literal["auto", "nixl", "mooncake", "grpc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How a worker's cache rows reach other workers, or theirs reach it."""

    engine: EngineChoice = "auto"
    """The transfer engine to use where the peer has it too; gRPC is what is left. "auto": the fastest that is here."""
    host: str = ""
    """Where peers reach this machine's memory, which Mooncake tells them; the worker's own host when empty."""
    protocol: str = "tcp"
    """Mooncake's: "tcp", "rdma" or "ascend"."""
    connect_timeout_s: float = 3.0
    """A peer to which a few bytes take longer is written to by the next slower engine."""

    @classmethod
    def named(cls, engine: str) -> TransferConfig:
        """The default but for the engine. Raises ConfigError when there is none of that name."""
        return cls(engine=cast(EngineChoice, engine))

    def at(self, host: str) -> TransferConfig:
        """With the worker's host where none was given."""
        return self if self.host else replace(self, host=host)

    def __post_init__(self) -> None:
        if self.engine not in get_args(EngineChoice):
            raise ConfigError(
                f"transfer engine is {self.engine!r}; give one of {', '.join(get_args(EngineChoice))}"
            )
        if self.connect_timeout_s <= 0:
            raise ConfigError(
                f"connect_timeout_s is {self.connect_timeout_s}; give a value above 0"
            )
