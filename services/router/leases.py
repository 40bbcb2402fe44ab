"""Prefilled state that prefill workers keep for running requests. Knows leases; never waits for one."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio

from dspark.v1 import prefill_service_pb2 as pb
from services.router.workers import PrefillWorker

RELEASE_TIMEOUT_S = 2.0


class Leases:
    """Releases leases in the background; one that cannot be released ends by itself on its worker."""

    def __init__(self) -> None:
        self._releasing: set[asyncio.Task[None]] = set()

    def release(self, worker: PrefillWorker, lease_id: str) -> None:
        task = asyncio.create_task(_release(worker, lease_id))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def close(self) -> None:
        """Wait for releases on their way."""
        if self._releasing:
            await asyncio.wait(tuple(self._releasing), timeout=RELEASE_TIMEOUT_S)


async def _release(worker: PrefillWorker, lease_id: str) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await worker.stub.ReleaseLease(
            pb.ReleaseLeaseRequest(lease_id=lease_id), timeout=RELEASE_TIMEOUT_S
        )
