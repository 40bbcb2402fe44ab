"""Whether a process has certainly ended. Knows addresses and generations; silence is never proof."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio


async def is_gone(
    address: str, generation: str, ask_generation: Callable[[], Awaitable[str]], *, timeout_s: float
) -> bool:
    """True when the process that had `generation` at `address` has certainly ended.

    That is so when another generation answers there, or when a call fails and the host says that nobody listens on the
    port. A timeout or an unreachable host proves nothing: the process may live and still write.
    """
    if not generation:
        return False
    try:
        async with asyncio.timeout(timeout_s):
            return await ask_generation() != generation
    except TimeoutError:
        return False
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            return False
    return await is_refused(address, timeout_s=timeout_s)


async def is_refused(address: str, *, timeout_s: float) -> bool:
    """Whether the host answers that nobody listens on the port."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False
