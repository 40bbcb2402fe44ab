"""TCP ports of this machine. Knows whether they are free now, which is all that can be known."""

from __future__ import annotations

import contextlib
import socket

from services.cli.failures import EXIT_NETWORK, Failure


def free_ports(host: str, count: int) -> list[int]:
    """Different ports that nobody listens on; taken and let go, so somebody else may be quicker."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(_bound(host, 0)) for _ in range(count)]
        return [int(bound.getsockname()[1]) for bound in sockets]


def require_free(host: str, port: int, flag: str) -> None:
    """Raise a Failure that names the flag to change when somebody listens on the port. Port 0 is always free."""
    try:
        _bound(host, port).close()
    except OSError as error:
        raise Failure(
            f"cannot listen on {host}:{port} ({error.strerror}); stop what uses it or choose another with {flag}",
            exit_code=EXIT_NETWORK,
        ) from None


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
