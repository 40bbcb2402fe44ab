"""Claims about how the client is configured, without a socket."""

from __future__ import annotations

import json

import pytest

import dspark
from dspark import options


def arguments(**changes: object) -> dict[str, str | int]:
    settings: dict[str, object] = {
        "retry": options.DEFAULT_RETRY,
        "keepalive": options.DEFAULT_KEEPALIVE,
        "tls": None,
        "extra": (),
    }
    return dict(options.channel_options(**{**settings, **changes}))  # type: ignore[arg-type]


def test_long_prompts_are_retried_too() -> None:
    """gRPC gives up retrying requests above 256 KiB unless the buffer is raised; a long prompt is several MB."""
    assert arguments()["grpc.per_rpc_retry_buffer_size"] == options.MAX_MESSAGE_BYTES


def test_keepalive_uses_the_names_that_grpc_knows() -> None:
    given = arguments(keepalive=dspark.KeepAliveConfig(time_s=5, timeout_s=2.5))
    assert given["grpc.keepalive_time_ms"] == 5000
    assert given["grpc.keepalive_timeout_ms"] == 2500
    assert given["grpc.keepalive_permit_without_calls"] == 1
    assert given["grpc.http2.max_pings_without_data"] == 0


def test_only_unavailable_is_retried() -> None:
    config = json.loads(
        str(arguments(retry=dspark.RetryConfig(max_attempts=3))["grpc.service_config"])
    )
    (method,) = config["methodConfig"]
    assert method["name"] == [{"service": "dspark.v1.InferenceService"}]
    assert method["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    assert method["retryPolicy"]["maxAttempts"] == 3


def test_one_attempt_means_no_retry_policy() -> None:
    retry = dspark.RetryConfig(max_attempts=1)
    assert "retryPolicy" not in str(options.service_config(retry))
    assert arguments(retry=retry)["grpc.enable_retries"] == 0


def test_given_channel_options_win() -> None:
    given = arguments(extra=(("grpc.keepalive_time_ms", 7),))
    assert given["grpc.keepalive_time_ms"] == 7


def test_endpoint_and_key_come_from_argument_then_environment_then_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(options.ENDPOINT_VARIABLE, raising=False)
    monkeypatch.delenv(options.API_KEY_VARIABLE, raising=False)
    assert options.endpoint_or_default(None) == options.DEFAULT_ENDPOINT
    assert options.api_key_or_default(None) is None
    monkeypatch.setenv(options.ENDPOINT_VARIABLE, "there:1")
    monkeypatch.setenv(options.API_KEY_VARIABLE, "from-environment")
    assert options.endpoint_or_default(None) == "there:1"
    assert options.api_key_or_default(None) == "from-environment"
    assert options.endpoint_or_default("here:2") == "here:2"
    assert options.api_key_or_default("given") == "given"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"max_attempts": 6},
        {"initial_backoff_s": 0},
        {"initial_backoff_s": 3, "max_backoff_s": 2},
        {"backoff_multiplier": 0.5},
    ],
)
def test_impossible_retry_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="give"):
        dspark.RetryConfig(**wrong)  # type: ignore[arg-type]


def test_a_client_certificate_needs_its_key() -> None:
    with pytest.raises(ValueError, match="both or neither"):
        dspark.TLSConfig(cert_file="client.pem")  # type: ignore[arg-type]
