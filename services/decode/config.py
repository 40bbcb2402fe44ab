"""What a decode worker is told at its start. Parsed at the edge, checked here, never changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.rpc.worker_process import Patience
from common.telemetry.compat import Compat
from common.transfer.config import TransferConfig

if TYPE_CHECKING:
    # Configuration is read before torch is loaded.
    from common.engine.settings import EngineSettings


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
    metrics_compat: Compat = "none"
    """Whose names metrics are shown under, too."""
    computes_prompts: bool = False
    """Compute prompts too, so that no prefill worker is needed."""
    reservation_s: float = 30.0
    """How long a reservation waits for the next sign of its prefill worker or its router before it ends."""
    admin_key_file: Path | None = None
    """Holds the key without which nobody is shown what the engine does; nobody is without a file."""
    stall_s: float = 30.0
    """A step that takes longer makes the worker not ready."""
    dead_s: float = 120.0
    """A step that takes longer fails the liveness probe."""
    drain_s: float = 30.0
    """How long running requests may go on after a stop was asked for."""

    def __post_init__(self) -> None:
        if self.reservation_s <= 0:
            raise ConfigError(f"reservation_s is {self.reservation_s}; give a value above 0")
        _ = self.patience  # refuses what cannot work

    @property
    def patience(self) -> Patience:
        """Raises ConfigError when its values cannot work."""
        return Patience(stall_s=self.stall_s, dead_s=self.dead_s, drain_s=self.drain_s)
