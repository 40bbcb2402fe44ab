"""Prefilled state that prefill workers keep for running requests. Knows leases; never waits for one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import grpc.aio

from common.telemetry.tracing import apart
from dspark.v1 import prefill_service_pb2 as pb
from services.router.policy import WorkerState
from services.router.prefill_worker import PrefillWorker

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
RENEWALS_PER_LEASE = 3
"""A lease survives that one of them is lost."""
MAX_RENEWALS = 4096
"""Leases in one call; what a prefill worker takes."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """State that a prefill worker keeps for one request."""

    worker: PrefillWorker
    generation: str
    """Of the worker when it granted the lease."""
    lease_id: str
    lease_s: float
    has_ended: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether the state may still be there, as far as is known here. A draining worker hands over, too."""
        return (
            not self.has_ended
            and self.worker.state in (WorkerState.READY, WorkerState.DRAINING)
            and self.worker.generation == self.generation
        )


class Leases:
    """Renews leases while their requests run and releases them after, both in the background.

    One call renews all leases of a worker. A lease that cannot be released ends by itself on its worker.
    """

    def __init__(self) -> None:
        self._held: dict[PrefillWorker, dict[str, Lease]] = {}
        self._renewing: dict[PrefillWorker, asyncio.Task[None]] = {}
        self._releasing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def hold(self, worker: PrefillWorker, lease_id: str, lease_s: float) -> Lease:
        """Keep a lease from ending until `release`."""
        lease = Lease(
            worker=worker, generation=worker.generation, lease_id=lease_id, lease_s=lease_s
        )
        self._held.setdefault(worker, {})[lease_id] = lease
        if worker not in self._renewing and lease_s > 0:
            with apart():
                self._renewing[worker] = asyncio.create_task(self._keep_renewed(worker))
        return lease

    def release(self, lease: Lease) -> None:
        """The request needs its state no more."""
        self._forget(lease)
        if not lease.has_ended:
            with apart():
                task = asyncio.create_task(_release(lease))
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)

    def release_unheard(self, worker: PrefillWorker, lease_id: str) -> None:
        """The request was left; free what its prefill may have come to without our hearing of it."""
        if lease_id not in self._held.get(worker, {}):
            self.release(
                Lease(worker=worker, generation=worker.generation, lease_id=lease_id, lease_s=0.0)
            )

    async def renew(self, worker: PrefillWorker) -> None:
        """Let all leases of a worker begin anew. A call that fails changes nothing: the next one may do."""
        lease_ids = list(self._held.get(worker, ()))
        for first in range(0, len(lease_ids), MAX_RENEWALS):
            request = pb.RenewLeasesRequest(lease_ids=lease_ids[first : first + MAX_RENEWALS])
            try:
                answer = await worker.stub.RenewLeases(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                logger.debug("leases at %s were not renewed: %s", worker.address, error.details())
                return
            for lease_id in answer.ended_lease_ids:
                self._end(worker, lease_id)

    async def close(self) -> None:
        """Renew no more and wait for releases on their way."""
        for renewing in tuple(self._renewing.values()):
            renewing.cancel()
        if self._releasing:
            await asyncio.wait(tuple(self._releasing), timeout=CALL_TIMEOUT_S)

    async def _keep_renewed(self, worker: PrefillWorker) -> None:
        while held := self._held.get(worker):
            lease_s = min(lease.lease_s for lease in held.values())
            await asyncio.sleep(lease_s / RENEWALS_PER_LEASE)
            await self.renew(worker)
        del self._renewing[worker]

    def _end(self, worker: PrefillWorker, lease_id: str) -> None:
        lease = self._held.get(worker, {}).get(lease_id)
        if lease is not None:
            lease.has_ended = True
            self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        held = self._held.get(lease.worker, {})
        held.pop(lease.lease_id, None)
        if not held:
            self._held.pop(lease.worker, None)


async def _release(lease: Lease) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await lease.worker.stub.ReleaseLease(
            pb.ReleaseLeaseRequest(lease_id=lease.lease_id), timeout=CALL_TIMEOUT_S
        )
