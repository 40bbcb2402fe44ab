"""A decode worker as the router sees it, with the channel and the stream to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc.aio

from common.telemetry.metrics.router import RoutingMetrics
from dspark.v1 import decode_service_pb2, worker_pb2
from dspark.v1.decode_service_pb2_grpc import DecodeServiceStub
from services.router.decode_link import DecodeLink
from services.router.policy import WorkerLoad, WorkerState
from services.router.worker import Worker

if TYPE_CHECKING:
    # Generated stubs are typed apart from how they run.
    from dspark.v1.decode_service_pb2_grpc import DecodeServiceAsyncStub


class DecodeWorker(Worker):
    """A worker that generates tokens, with the stream to it."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        metrics: RoutingMetrics,
        *,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(address, "decode", metrics)
        self._channel = channel
        self.stub: DecodeServiceAsyncStub = DecodeServiceStub(channel)
        self.link = DecodeLink(address, self.stub, on_closed=self._link_closed, on_room=on_change)
        self.link_closed = asyncio.Event()
        self._on_change = on_change

    async def ask(self, timeout_s: float) -> worker_pb2.WorkerInfo:
        request = decode_service_pb2.DecodeServiceGetWorkerInfoRequest()
        return (await self.stub.GetWorkerInfo(request, timeout=timeout_s)).info

    @property
    def computes_prompts(self) -> bool:
        return self.info is not None and self.info.computes_prompts

    def load(self) -> WorkerLoad:
        """A worker without a stream to it cannot be used, whatever it says of itself."""
        load = super().load()
        return load if self.link.is_open else replace(load, state=WorkerState.UNREACHABLE)

    async def close(self) -> None:
        self.forget()
        await self.link.close()
        await self._channel.close()

    def _link_closed(self, why: str) -> None:
        self.missed(why)
        self.link_closed.set()
        self._on_change()
