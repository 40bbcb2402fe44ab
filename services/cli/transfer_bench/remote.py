"""The measuring end's view of the receiver. Knows addresses and questions; times nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from common.errors import ConfigError
from services.cli.failures import EXIT_NETWORK, Failure
from services.cli.transfer_bench.patterns import Pattern
from services.cli.transfer_bench.protocol import (
    MAX_LINE_BYTES,
    Clear,
    CpuTime,
    Digest,
    Lines,
    Opening,
    receiver_from_json,
)

CONNECT_S = 10.0


class Remote:
    """A receiver that has opened its memory."""

    def __init__(self, host: str, lines: Lines, answer: dict[str, object]) -> None:
        self.host = host
        self.receiver = receiver_from_json(answer)
        self._lines = lines

    @property
    def grpc_address(self) -> str:
        return f"{self.host}:{self.receiver.grpc_port}"

    async def clear(self) -> None:
        await self._lines.ask(Clear())

    async def digest(self, pattern: Pattern) -> str:
        """Of what has arrived, in the sender's order."""
        question = Digest(size_bytes=pattern.size_bytes, num_ranges=pattern.num_ranges)
        return str(await self._lines.ask(question))

    async def cpu_s(self) -> float:
        """What the receiver's process has computed so far."""
        return float(await self._lines.ask(CpuTime()))


@contextlib.asynccontextmanager
async def open_remote(address: str, opening: Opening) -> AsyncIterator[Remote]:
    """The receiver at host:port, told to be there. Raises Failure when it is not."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"peer is {address!r}; give host:port")
    try:
        async with asyncio.timeout(CONNECT_S):
            connection = await asyncio.open_connection(host, int(port), limit=MAX_LINE_BYTES)
        lines = Lines(*connection)
    except (OSError, TimeoutError) as error:
        raise Failure(
            f"nobody answers at {address} ({error}); start `dspark bench transfer --serve HOST:PORT` there",
            exit_code=EXIT_NETWORK,
        ) from None
    try:
        yield Remote(host, lines, await lines.ask(opening))
    except (ConnectionError, TimeoutError) as error:
        raise Failure(
            f"{address}: {error or 'no answer in time'}", exit_code=EXIT_NETWORK
        ) from None
    finally:
        lines.close()
