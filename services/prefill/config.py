"""What a prefill worker is told at its start. Parsed at the edge, checked here, never changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.transfer.config import TransferConfig
from common.transfer.faults import FaultPlan

if TYPE_CHECKING:
    # Configuration is read before torch is loaded.
    from common.engine.build import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """How finished state leaves."""

    negotiate_timeout_s: float = 5.0
    transfer_timeout_s: float = 60.0
    """For the bytes that are under way at one time."""
    complete_timeout_s: float = 30.0
    """The receiver digests all bytes in that time."""
    abort_timeout_s: float = 1.0
    lease_s: float = 30.0
    """How long handed-over state is kept for another decode worker; less when its room is needed."""
    sends_drafter_state: bool = True
    """False leaves the drafter's rows behind, which shows what they are worth."""

    def __post_init__(self) -> None:
        for name in (
            "negotiate_timeout_s",
            "transfer_timeout_s",
            "complete_timeout_s",
            "abort_timeout_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a value above 0")
        if self.lease_s < 0:
            raise ConfigError(f"lease_s is {self.lease_s}; give 0 or more")


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
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    faults: FaultPlan = field(default_factory=FaultPlan)
    """Writes that go wrong on purpose, for drills."""
    max_queued: int = 256
    """Requests that may wait for room; one more is refused."""
    job_timeout_s: float = 600.0
    """Bound of a prefill's wait for room, and of its work after that, whatever its caller allows."""
    stall_s: float = 30.0
    """A step that takes longer makes the worker not ready."""
    drain_s: float = 30.0
    """How long running requests may go on after a stop was asked for."""

    def __post_init__(self) -> None:
        if self.max_queued < 0 or self.drain_s < 0:
            raise ConfigError("max_queued and drain_s must not be below 0")
        for name in ("stall_s", "job_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a value above 0")
