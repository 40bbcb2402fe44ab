"""Metrics and probes over plain HTTP, on a port of their own. Knows paths and a socket; no names and no health."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from common.errors import ConfigError
from common.telemetry.probes import Check, Probes

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

logger = logging.getLogger(__name__)

CALL_S = 10.0
"""For a connection that says nothing."""


class AdminServer:
    """Answers until `close`, on threads of its own. Port 0 serves nothing.

    /livez, /readyz and /startupz answer 200 "ok", or 503 with the reason; everything else is what the registry holds.
    """

    def __init__(
        self, registry: CollectorRegistry, probes: Probes, *, host: str, port: int
    ) -> None:
        """Raises ConfigError when the port cannot be bound."""
        self._server: WSGIServer | None = None
        if not port:
            return
        app = _app(registry, probes)
        try:
            server_class = _ServerV6 if ":" in host else _Server
            self._server = make_server(host, port, app, server_class, handler_class=_QuietHandler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; give another admin_port"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="admin port", daemon=True
        )
        self._thread.start()
        logger.info("metrics and probes are at http://%s:%d/metrics, /livez, /readyz", host, port)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


Application = Callable[["WSGIEnvironment", "StartResponse"], Iterable[bytes]]


def _app(registry: CollectorRegistry, probes: Probes) -> Application:
    metrics: Application = make_wsgi_app(registry)
    checks = {
        "/livez": probes.liveness,
        "/readyz": probes.readiness,
        "/startupz": probes.startup,
    }

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        check = checks.get(environ["PATH_INFO"])
        if check is not None:
            return _answer(check, start_response)
        environ["HTTP_ACCEPT"] = _unescaped(environ.get("HTTP_ACCEPT", ""))
        return metrics(environ, start_response)

    return app


def _unescaped(accept: str) -> str:
    """The client library writes a colon of a name as an underscore in OpenMetrics unless names may have any letter."""
    return ",".join(
        f"{kind};escaping=allow-utf-8"
        if "openmetrics-text" in kind and "escaping" not in kind
        else kind
        for kind in accept.split(",")
    )


def _answer(check: Check, start_response: StartResponse) -> Iterable[bytes]:
    reason = check()
    status = "200 OK" if reason is None else "503 Service Unavailable"
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{reason or 'ok'}\n".encode()]


class _Server(ThreadingMixIn, WSGIServer):
    """A scrape that takes long does not keep a probe waiting."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Without asking DNS for the host's name, which takes long where there is none to answer."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked has gone, or never said what for."""
        logger.debug("a call to the admin port was not finished", exc_info=True)


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    """A line for every probe would be most of a log."""

    timeout = CALL_S

    def log_message(self, format: str, *args: object) -> None:
        return
