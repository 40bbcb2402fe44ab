"""Metrics over HTTP, on a port of their own. Knows a registry and a socket; no names."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, start_http_server

from common.errors import ConfigError

logger = logging.getLogger(__name__)


class AdminServer:
    """Serves what a registry holds until `close`, on a thread of its own. Port 0 serves nothing."""

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int) -> None:
        """Raises ConfigError when the port cannot be bound."""
        self._server = None
        if not port:
            return
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; give another admin_port"
            ) from error
        logger.info("metrics are at http://%s:%d/metrics", host, port)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
