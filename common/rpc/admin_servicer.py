"""What those who run a worker ask of it. Converts and delegates."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol

import grpc.aio

from common.rpc.admin_key import AdminKey
from dspark.v1 import admin_service_pb2 as pb
from dspark.v1.admin_service_pb2_grpc import (
    AdminServiceServicer,
    add_AdminServiceServicer_to_server,
)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
PIECE_BYTES = 1024 * 1024


class Recording(Protocol):
    """What a profiler recorded."""

    @property
    def num_steps(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def trace(self) -> bytes: ...


class Profiler(Protocol):
    """Records an engine; raises a ServingError that says why it did not."""

    def record(self, *, max_steps: int, max_seconds: float) -> Awaitable[Recording]: ...


def register_admin(server: grpc.aio.Server, profiler: Profiler, key: AdminKey) -> None:
    """Add the service, every call of which needs the key."""
    add_AdminServiceServicer_to_server(AdminServicer(profiler, key), server)


class AdminServicer(AdminServiceServicer):
    """`dspark.v1.AdminService` of a worker."""

    def __init__(self, profiler: Profiler, key: AdminKey) -> None:
        self._profiler = profiler
        self._key = key

    async def Profile(
        self, request: pb.ProfileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ProfileResponse]:
        self._key.require(context.invocation_metadata())
        recording = await self._profiler.record(
            max_steps=request.max_steps, max_seconds=request.max_seconds
        )
        profile = pb.Profile(
            num_steps=recording.num_steps,
            seconds=recording.seconds,
            num_bytes=len(recording.trace),
        )
        yield pb.ProfileResponse(profile=profile)
        for begin in range(0, len(recording.trace), PIECE_BYTES):
            yield pb.ProfileResponse(trace=recording.trace[begin : begin + PIECE_BYTES])
