"""TCP ports of this machine. Knows whether they are free now, which is all that can be known."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from services.cli.failures import EXIT_NETWORK, Failure

FIRST_PORT = 10_000
SYSTEMS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that the system gives to whoever names none: to every connection, and to servers like a transfer
engine's."""


def free_ports(host: str, count: int) -> list[int]:
    """Different ports that nobody listens on; taken and let go, so somebody else may be quicker.

    They are none that the system gives away by itself, as it would while the processes start that they are meant for.
    """
    ports = _candidates()
    with contextlib.ExitStack() as held:
        return [int(_next_bound(host, ports, held).getsockname()[1]) for _ in range(count)]


def require_free(host: str, port: int, flag: str) -> None:
    """Raise a Failure that names the flag to change when somebody listens on the port. Port 0 is always free."""
    try:
        _bound(host, port).close()
    except OSError as error:
        raise Failure(
            f"cannot listen on {host}:{port} ({error.strerror}); stop what uses it or choose another with {flag}",
            exit_code=EXIT_NETWORK,
        ) from None


def _candidates() -> Iterator[int]:
    """Ports in no order, and then 0 for ever, which leaves the choice to the system."""
    first = FIRST_PORT
    with contextlib.suppress(OSError, ValueError, IndexError):
        first = int(SYSTEMS_PORTS.read_text(encoding="ascii").split()[0])
    ports = list(range(FIRST_PORT, first))
    random.shuffle(ports)
    yield from ports
    while True:
        yield 0


def _next_bound(host: str, ports: Iterator[int], held: contextlib.ExitStack) -> socket.socket:
    for port in ports:
        try:
            return held.enter_context(_bound(host, port))
        except OSError:
            if port == 0:
                raise
    raise AssertionError("there is always a candidate")


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # As servers do it: connections of a server that has just ended do not block its port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
