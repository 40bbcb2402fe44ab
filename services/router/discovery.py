"""DNS names that stand for many workers, and the addresses that they have now. Knows names; never asks a worker.

A headless Service of Kubernetes has one address per pod, and a name is all that a router needs of it: no API server, no
credentials.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from common.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "dns:"

Resolve = Callable[[str], Awaitable[Iterable[str]]]
"""From a host name to all its IP addresses. Raises OSError when there are none or nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerName:
    """A name whose every address is a worker on the same port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> WorkerName:
        """From `dns:host:port`. Raises ConfigError."""
        host, _, port = text.removeprefix(PREFIX).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{text!r} names no workers; give {PREFIX}host:port")
        return cls(host=host, port=int(port))


class Discovery:
    """The workers of one role: addresses that never change, and those that names have."""

    def __init__(
        self, entries: Iterable[str], *, resolve: Resolve | None = None, timeout_s: float
    ) -> None:
        """`entries` are `host:port`, or `dns:host:port`. Raises ConfigError for what cannot be read."""
        entries = tuple(entries)
        self.fixed = tuple(entry for entry in entries if not entry.startswith(PREFIX))
        self.names = tuple(WorkerName.parse(entry) for entry in entries if entry.startswith(PREFIX))
        self._resolve = resolve or resolve_host
        self._timeout_s = timeout_s
        self._known: dict[WorkerName, frozenset[str]] = {}
        """As last heard."""
        self._is_failing: set[WorkerName] = set()

    async def look(self) -> frozenset[str]:
        """All addresses there are now. A name that cannot be resolved keeps those that it had."""
        await asyncio.gather(*map(self._look, self.names))
        return frozenset(self.fixed).union(*self._known.values())

    async def _look(self, name: WorkerName) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                hosts = frozenset(await self._resolve(name.host))
        except (OSError, TimeoutError) as error:
            # A Service without pods has no address either, so this is no news while workers start.
            if name not in self._is_failing:
                logger.info("%s has no address now: %s", name.host, error or "no answer in time")
            self._is_failing.add(name)
            return
        self._is_failing.discard(name)
        self._known[name] = frozenset(_address(host, name.port) for host in hosts)


async def resolve_host(host: str) -> frozenset[str]:
    """As the system resolves it, with all addresses of all families."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return frozenset(str(address[0]) for *_, address in found)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
