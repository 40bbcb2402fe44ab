"""gRPC options that servers and clients share, each with the reason it is not the default."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Of one message. A prompt of a million tokens takes about 3 MiB; gRPC's own default is 4 MiB."""

Options = list[tuple[str, int | str]]


def server_options(*, max_message_bytes: int, max_connection_age_s: float) -> Options:
    """Options of every server; a connection age of 0 lets connections live for ever."""
    options: Options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Clients ping every 30 s while a long prompt is computed in silence; the defaults answer
        # that with "too many pings" and drop the connection.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # Two processes on one port would share its connections at random; fail loudly instead.
        ("grpc.so_reuseport", 0),
    ]
    if max_connection_age_s > 0:
        # Lets new replicas behind a load balancer get their share; running calls are not cut.
        options.append(("grpc.max_connection_age_ms", int(max_connection_age_s * 1000)))
    return options


def channel_options(*, max_message_bytes: int) -> Options:
    """Options of every client channel between services."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A worker that starts or comes back is used within a moment, not after gRPC's two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 250),
        # Channels to the same address do not share a connection: each decode stream has its own.
        ("grpc.use_local_subchannel_pool", 1),
        # Workers are addressed directly, whatever proxy the environment names for the web.
        ("grpc.enable_http_proxy", 0),
    ]
