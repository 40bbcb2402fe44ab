"""How a client reaches its server. Knows settings and what gRPC calls them; opens nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from dspark._version import __version__

ENDPOINT_VARIABLE = "DSPARK_ENDPOINT"
API_KEY_VARIABLE = "DSPARK_API_KEY"
DEFAULT_ENDPOINT = "localhost:50051"
SERVICE = "dspark.v1.InferenceService"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

ChannelOption = tuple[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """When a call is tried again: only if the server was unavailable, and never once anything was generated."""

    max_attempts: int = 4
    """The first one included, so 1 never tries again; gRPC allows 5."""
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    backoff_multiplier: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= 5:
            raise ValueError(f"max_attempts is {self.max_attempts}; give 1 to 5")
        if not 0 < self.initial_backoff_s <= self.max_backoff_s:
            raise ValueError(
                f"initial_backoff_s is {self.initial_backoff_s}; "
                f"give more than 0 and at most max_backoff_s ({self.max_backoff_s})"
            )
        if self.backoff_multiplier < 1:
            raise ValueError(f"backoff_multiplier is {self.backoff_multiplier}; give 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAliveConfig:
    """How a dead connection is noticed."""

    time_s: float = 30.0
    """Silence after which the client pings; a server cuts off clients that ping much more often."""
    timeout_s: float = 20.0
    """How long the answer to a ping may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TLSConfig:
    """Encryption, and with a certificate of the client's own, mutual TLS."""

    ca_file: Path | None = None
    """PEM certificates to trust; None trusts what gRPC trusts."""
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None
    """Name that the server's certificate must carry, where it differs from the endpoint's host."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together; give both or neither")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files; a rotated certificate needs a new client. Raises OSError if one cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca_file.read_bytes() if self.ca_file else None,
            private_key=self.key_file.read_bytes() if self.key_file else None,
            certificate_chain=self.cert_file.read_bytes() if self.cert_file else None,
        )


DEFAULT_TIMEOUT_S = 600.0
DEFAULT_RETRY = RetryConfig()
DEFAULT_KEEPALIVE = KeepAliveConfig()


def endpoint_or_default(endpoint: str | None) -> str:
    """What was given, else DSPARK_ENDPOINT, else the local default."""
    return endpoint or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT


def api_key_or_default(api_key: str | None) -> str | None:
    """What was given, else DSPARK_API_KEY, else none."""
    return api_key or os.environ.get(API_KEY_VARIABLE) or None


def channel_options(
    *,
    retry: RetryConfig,
    keepalive: KeepAliveConfig,
    tls: TLSConfig | None,
    extra: Sequence[ChannelOption],
) -> list[ChannelOption]:
    """gRPC's channel arguments; `extra` comes last and wins."""
    options: list[ChannelOption] = [
        ("grpc.primary_user_agent", f"dspark-client/{__version__}"),
        ("grpc.service_config", json.dumps(service_config(retry))),
        ("grpc.enable_retries", int(retry.max_attempts > 1)),
        # gRPC silently never retries a request larger than this buffer, 256 KiB unless told.
        ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", round(keepalive.time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive.timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Connections of its own: a new client must not wait for what another one's attempts at an address have found.
        ("grpc.use_local_subchannel_pool", 1),
        # A router that comes back is used again within seconds, not after gRPC's two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]
    if tls is not None and tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return [*options, *extra]


def service_config(retry: RetryConfig) -> dict[str, object]:
    """gRPC's service config: calls spread over every address of the endpoint, and the retry policy."""
    method: dict[str, object] = {"name": [{"service": SERVICE}]}
    if retry.max_attempts > 1:
        method["retryPolicy"] = {
            "maxAttempts": retry.max_attempts,
            "initialBackoff": f"{retry.initial_backoff_s:.3f}s",
            "maxBackoff": f"{retry.max_backoff_s:.3f}s",
            "backoffMultiplier": retry.backoff_multiplier,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
    return {"loadBalancingConfig": [{"round_robin": {}}], "methodConfig": [method]}
