"""Client channels between services."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from common.rpc.options import MAX_MESSAGE_BYTES, channel_options


def open_channel(
    address: str,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
) -> grpc.aio.Channel:
    """A channel to one worker. The caller closes it; calls fail at once while the peer is away."""
    options = channel_options(max_message_bytes=max_message_bytes)
    return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
