"""A gRPC server as all services run it: options, health, reflection, errors. Knows no service by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import ConfigError
from common.rpc.interceptor import ErrorInterceptor
from common.rpc.options import MAX_MESSAGE_BYTES, server_options

LIVENESS = "liveness"
READINESS = "readiness"
OVERALL = ""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def build_server(
    *,
    host: str,
    port: int,
    service_names: Sequence[str],
    register: Callable[[grpc.aio.Server], None],
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_connection_age_s: float = 0.0,
) -> RpcServer:
    """A server with the fully qualified services that `register` adds, bound but not started.

    Port 0 takes a free one. `interceptors` run outside the one that answers errors. Must be called inside the event
    loop that will serve. Raises ConfigError when the port cannot be bound.
    """
    server = grpc.aio.server(
        interceptors=(*interceptors, ErrorInterceptor()),
        options=server_options(
            max_message_bytes=max_message_bytes, max_connection_age_s=max_connection_age_s
        ),
    )
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    register(server)
    reflection.enable_server_reflection(
        (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    try:
        bound_port = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {host}:{port}; is it in use?") from error
    return RpcServer(server, health_servicer, tuple(service_names), host, bound_port)


class RpcServer:
    """A server with its health. Not ready until `set_ready(True)`; alive from `start` to `stop`."""

    def __init__(
        self,
        server: grpc.aio.Server,
        health_servicer: health.aio.HealthServicer,
        service_names: tuple[str, ...],
        host: str,
        port: int,
    ) -> None:
        self._server = server
        self._health = health_servicer
        self._service_names = service_names
        self.host = host
        self.port = port

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self) -> None:
        """Begin to answer; liveness is SERVING, everything else NOT_SERVING until ready."""
        await self._health.set(LIVENESS, _SERVING)
        await self.set_ready(False)
        await self._server.start()

    async def set_ready(self, is_ready: bool) -> None:
        """Report whether new requests are welcome, per service, overall and as "readiness"."""
        status = _SERVING if is_ready else _NOT_SERVING
        for name in (OVERALL, READINESS, *self._service_names):
            await self._health.set(name, status)

    async def set_alive(self, is_alive: bool) -> None:
        """Report whether the process should be left running."""
        await self._health.set(LIVENESS, _SERVING if is_alive else _NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish for `grace_s` seconds, then cancel them."""
        await self.set_ready(False)
        await self._server.stop(grace_s)
