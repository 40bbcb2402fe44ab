"""What a prefill worker is told at its start. Parsed at the edge, checked here, never changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.rpc.worker_process import Patience
from common.telemetry.compat import Compat
from common.transfer.config import TransferConfig
from common.transfer.faults import FaultPlan

if TYPE_CHECKING:
    # Configuration is read before torch is loaded.
    from common.engine.settings import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """How finished state leaves."""

    negotiate_timeout_s: float = 5.0
    transfer_timeout_s: float = 10.0
    """For the bytes that are under way at one time, and more by as many seconds as they take at `min_transfer_mb_per_s`."""
    min_transfer_mb_per_s: float = 10.0
    """10^6 bytes per second; a write that is slower is given up. A chunk of a prompt is some megabytes and thus given up
    soon, what a lease keeps of a million tokens some thousands and waited for as long as a slow link takes."""
    complete_timeout_s: float = 30.0
    """The receiver digests all bytes in that time."""
    announced_bytes: int = 1 << 18
    """Whenever so many have arrived, the receiver hears of it and digests them while others travel or a first token is
    drawn. Fewer are digested in less time than the news takes."""
    abort_timeout_s: float = 1.0
    lease_s: float = 30.0
    """How long handed-over state is kept for another decode worker; less when its room is needed."""
    sends_drafter_state: bool = True
    """False leaves the drafter's rows behind, which shows what they are worth."""

    def __post_init__(self) -> None:
        for name in (
            "negotiate_timeout_s",
            "transfer_timeout_s",
            "min_transfer_mb_per_s",
            "complete_timeout_s",
            "abort_timeout_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a value above 0")
        if self.lease_s < 0:
            raise ConfigError(f"lease_s is {self.lease_s}; give 0 or more")

    def write_timeout_s(self, num_bytes: int) -> float:
        """How long a write of so many bytes may take."""
        return self.transfer_timeout_s + num_bytes / (self.min_transfer_mb_per_s * 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """One prefill worker."""

    host: str = "127.0.0.1"
    port: int = 50052
    """0 takes a free port."""
    advertise_host: str = ""
    """Where decode workers reach this one; `host` when empty, or the machine's name when that is every address."""
    model: str
    """Name of the served model."""
    engine: EngineSettings
    transfer: TransferConfig = field(default_factory=TransferConfig)
    admin_port: int = 0
    """Where metrics are served over HTTP; 0 serves none."""
    metrics_compat: Compat = "none"
    """Whose names metrics are shown under, too."""
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    faults: FaultPlan = field(default_factory=FaultPlan)
    """Writes that go wrong on purpose, for drills."""
    max_queued: int = 256
    """Requests that may wait for room; one more is refused."""
    job_timeout_s: float = 600.0
    """Bound of a prefill's wait for room, and of its work after that, whatever its caller allows."""
    admin_key_file: Path | None = None
    """Holds the key without which nobody is shown what the engine does; nobody is without a file."""
    stall_s: float = 30.0
    """A step that takes longer makes the worker not ready."""
    dead_s: float = 120.0
    """A step that takes longer fails the liveness probe."""
    drain_s: float = 30.0
    """How long running requests may go on after a stop was asked for."""

    def __post_init__(self) -> None:
        if self.max_queued < 0:
            raise ConfigError(f"max_queued is {self.max_queued}; give 0 or more")
        if self.job_timeout_s <= 0:
            raise ConfigError(f"job_timeout_s is {self.job_timeout_s}; give a value above 0")
        _ = self.patience  # refuses what cannot work

    @property
    def patience(self) -> Patience:
        """Raises ConfigError when its values cannot work."""
        return Patience(stall_s=self.stall_s, dead_s=self.dead_s, drain_s=self.drain_s)
