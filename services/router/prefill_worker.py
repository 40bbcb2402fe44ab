"""A prefill worker as the router sees it, with the channel to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc.aio

from common.telemetry.metrics.router import RoutingMetrics
from dspark.v1 import prefill_service_pb2, worker_pb2
from dspark.v1.prefill_service_pb2_grpc import PrefillServiceStub
from services.router.worker import Worker

if TYPE_CHECKING:
    # Generated stubs are typed apart from how they run.
    from dspark.v1.prefill_service_pb2_grpc import PrefillServiceAsyncStub


class PrefillWorker(Worker):
    """A worker that computes prompts."""

    def __init__(self, address: str, channel: grpc.aio.Channel, metrics: RoutingMetrics) -> None:
        super().__init__(address, "prefill", metrics)
        self._channel = channel
        self.stub: PrefillServiceAsyncStub = PrefillServiceStub(channel)

    async def ask(self, timeout_s: float) -> worker_pb2.WorkerInfo:
        request = prefill_service_pb2.PrefillServiceGetWorkerInfoRequest()
        return (await self.stub.GetWorkerInfo(request, timeout=timeout_s)).info

    async def connect(
        self, request: prefill_service_pb2.ConnectRequest, timeout_s: float
    ) -> prefill_service_pb2.ConnectResponse:
        """Have the worker meet a decode worker. Raises AioRpcError."""
        return await self.stub.Connect(request, timeout=timeout_s)

    async def close(self) -> None:
        self.forget()
        await self._channel.close()
