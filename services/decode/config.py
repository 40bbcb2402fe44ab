"""What a decode worker is told at its start. Parsed at the edge, checked here, never changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.transfer.config import TransferConfig

if TYPE_CHECKING:
    # Configuration is read before torch is loaded.
    from common.engine.build import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """One decode worker."""

    host: str = "127.0.0.1"
    port: int = 50053
    """0 takes a free port."""
    model: str
    """Name of the served model."""
    engine: EngineSettings
    transfer: TransferConfig = field(default_factory=TransferConfig)
    admin_port: int = 0
    """Where metrics are served over HTTP; 0 serves none."""
    computes_prompts: bool = False
    """Compute prompts too, so that no prefill worker is needed."""
    reservation_s: float = 30.0
    """How long a reservation waits for the next sign of its prefill worker or its router before it ends."""
    stall_s: float = 30.0
    """A step that takes longer makes the worker not ready."""
    drain_s: float = 30.0
    """How long running requests may go on after a stop was asked for."""

    def __post_init__(self) -> None:
        for name in ("reservation_s", "stall_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a value above 0")
        if self.drain_s < 0:
            raise ConfigError(f"drain_s is {self.drain_s}; give 0 or more")
