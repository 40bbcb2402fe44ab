"""What the router is told at its start. Parsed at the edge, checked here, never changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ConfigError
from common.rpc.options import MAX_MESSAGE_BYTES
from common.telemetry.compat import Compat


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """How requests wait for a place."""

    max_queued: int = 1024
    """Requests that may wait; one more is refused."""
    queue_timeout_s: float = 60.0
    """A request that found no place for so long is refused."""
    num_turns: int = 8
    """Requests at the head of the queue that try for a place at the same time."""

    def __post_init__(self) -> None:
        _require_positive("max_queued", self.max_queued)
        _require_positive("queue_timeout_s", self.queue_timeout_s)
        _require_positive("num_turns", self.num_turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How workers are watched. A worker that dies or stalls is noticed within poll period plus poll timeout."""

    poll_period_s: float = 0.5
    poll_timeout_s: float = 1.5
    """A worker that does not answer a question about itself for so long is lost, and its requests are placed again."""
    reserve_timeout_s: float = 2.0
    max_attempts: int = 3
    """Times that a request is placed before a failing worker's error becomes its own."""
    discovery_period_s: float = 2.0
    """How often names are looked up; workers with a fixed address need none."""
    discovery_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        _require_positive("poll_period_s", self.poll_period_s)
        _require_positive("poll_timeout_s", self.poll_timeout_s)
        _require_positive("reserve_timeout_s", self.reserve_timeout_s)
        _require_positive("max_attempts", self.max_attempts)
        _require_positive("discovery_period_s", self.discovery_period_s)
        _require_positive("discovery_timeout_s", self.discovery_timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router."""

    host: str = "127.0.0.1"
    port: int = 50051
    """0 takes a free port."""
    admin_port: int = 0
    """Where metrics are served over HTTP; 0 serves none."""
    metrics_compat: Compat = "none"
    """Whose names metrics are shown under, too."""
    prefill_addresses: tuple[str, ...] = ()
    """host:port each, or dns:host:port for all addresses that a name has now; may be empty when decode workers compute
    prompts themselves."""
    decode_addresses: tuple[str, ...]
    checkpoint_dir: Path
    """Folder with tokenizer.json and config.json; weights are not needed."""
    model: str
    """Name that requests may use."""
    request_timeout_s: float = 1800.0
    """Upper bound of a request's life, whatever its client allows."""
    drain_timeout_s: float = 120.0
    """How long running requests may go on after a stop was asked for."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_connection_age_s: float = 600.0
    """Clients reconnect after so long, so that new replicas get their share; 0 never."""
    queue: QueueConfig = field(default_factory=QueueConfig)
    workers: WorkerConfig = field(default_factory=WorkerConfig)

    def __post_init__(self) -> None:
        if not self.decode_addresses:
            raise ConfigError("decode_addresses is empty; name at least one decode worker")
        for addresses in (self.prefill_addresses, self.decode_addresses):
            if len(set(addresses)) < len(addresses):
                raise ConfigError(f"an address is given twice: {', '.join(addresses)}")
        if not self.model:
            raise ConfigError("model is empty; give the name that requests will use")
        _require_positive("request_timeout_s", self.request_timeout_s)
        _require_positive("max_message_bytes", self.max_message_bytes)


def _require_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ConfigError(f"{name} is {value}; give a value above 0")
