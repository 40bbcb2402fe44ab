"""Any transfer engine, with writes that go wrong as planned: for tests, and for drills of a deployment. Knows writes by
their number; nothing here is random."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np

from common.errors import ServingError, TransferFailed
from common.transfer.engine import TransferEngine, TransferId, WriteTarget
from common.transfer.engines import Engines
from common.transfer.faults import Fault, FaultKind, FaultPlan
from common.transfer.meeting import EngineDescriptor
from common.transfer.memory import PoolMemory
from common.transfer.ranges import ByteRanges
from common.transfer.writes import Writes

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Between two questions to the inner engine; its answer comes as soon as there is one."""


def with_faults(engines: Engines, plan: FaultPlan, memory: PoolMemory) -> Engines:
    """The same engines with faults; `memory` is what they were made with."""
    logger.warning("writes go wrong on purpose: %s", plan)
    writes = WriteCount()
    faulty = {
        name: FaultyEngine(engine, plan, memory, writes=writes)
        for name, engine in engines.by_name.items()
    }
    return replace(engines, by_name=faulty)


@dataclass(slots=True)
class WriteCount:
    """Writes of a process so far, by whichever engine."""

    value: int = 0


@dataclass(slots=True, kw_only=True)
class _Write:
    target: WriteTarget
    ranges: ByteRanges
    fault: Fault | None
    num_denials: int
    """Times that `cancel` still says that it may go on."""
    inner: TransferId | None = None


class FaultyEngine:
    """Passes everything on to another engine but what the plan names."""

    def __init__(
        self,
        inner: TransferEngine,
        plan: FaultPlan,
        memory: PoolMemory,
        *,
        writes: WriteCount | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        die: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL),
    ) -> None:
        """`memory` is what `inner` was made with; engines of one process share `writes`."""
        self.name = inner.name
        self.is_one_sided = inner.is_one_sided
        self._count = writes or WriteCount()
        self._inner = inner
        self._plan = plan
        self._memory = memory
        self._sleep = sleep
        self._die = die
        self._tasks = Writes()
        self._writes: dict[TransferId, _Write] = {}

    @property
    def num_writes(self) -> int:
        """Of the process so far."""
        return self._count.value

    @property
    def descriptor(self) -> EngineDescriptor:
        return self._inner.descriptor

    async def connect(
        self, address: str, descriptor: EngineDescriptor, *, timeout_s: float
    ) -> None:
        await self._inner.connect(address, descriptor, timeout_s=timeout_s)

    def receive(self) -> Callable[[], None]:
        return self._inner.receive()

    def write(self, target: WriteTarget, ranges: ByteRanges) -> TransferId:
        self._count.value += 1
        fault = self._plan.of(self.num_writes)
        if fault is not None:
            logger.warning(
                "request %s: fault %s in write %d",
                target.key.request_id,
                fault.kind.value,
                fault.write,
            )
        num_denials = int(fault.value) if fault and fault.kind is FaultKind.STALL else 0
        write = _Write(target=target, ranges=ranges, fault=fault, num_denials=num_denials)
        transfer = self._tasks.start(self._run(write))
        self._writes[transfer] = write
        return transfer

    async def poll(self, transfer: TransferId, *, timeout_s: float) -> bool:
        has_arrived = await self._tasks.poll(transfer, timeout_s=timeout_s)
        if has_arrived:
            del self._writes[transfer]
        return has_arrived

    async def cancel(self, transfer: TransferId, *, timeout_s: float) -> bool:
        write = self._writes.get(transfer)
        if write is None:
            return True
        if write.num_denials > 0:
            write.num_denials -= 1
            return False
        # Our task only waits for the inner engine, and has stopped as soon as it is cancelled.
        if not await self._tasks.stop(transfer, timeout_s=timeout_s, interrupts=True):
            return False
        if write.fault is not None and write.fault.kind is FaultKind.STALL and write.inner is None:
            await self._land_late(write, timeout_s)
        has_stopped = write.inner is None or await self._inner.cancel(
            write.inner, timeout_s=timeout_s
        )
        if has_stopped:
            del self._writes[transfer]
        return has_stopped

    async def close(self) -> None:
        await self._tasks.close()
        self._writes.clear()
        await self._inner.close()

    async def _run(self, write: _Write) -> None:
        match write.fault:
            case None:
                await self._pass_on(write)
            case Fault(kind=FaultKind.FAIL):
                raise TransferFailed(f"write {write.fault.write} failed as planned")
            case Fault(kind=FaultKind.DELAY, value=seconds):
                await self._sleep(seconds)
                await self._pass_on(write)
            case Fault(kind=FaultKind.DROP):
                await self._pass_on(write)
                await asyncio.get_running_loop().create_future()
            case Fault(kind=FaultKind.DUPLICATE):
                await self._pass_on(write)
                await self._pass_on(write)
            case Fault(kind=FaultKind.CORRUPT):
                write.ranges = self._corrupted(write.ranges)
                await self._pass_on(write)
            case Fault(kind=FaultKind.STALL):
                await asyncio.get_running_loop().create_future()
            case Fault(kind=FaultKind.DIE):
                self._die()

    async def _pass_on(self, write: _Write) -> None:
        write.inner = self._inner.write(write.target, write.ranges)
        while not await self._inner.poll(write.inner, timeout_s=POLL_S):
            pass

    async def _land_late(self, write: _Write, timeout_s: float) -> None:
        """What makes a write that is only given up dangerous: it arrives after all, if the receiver lets it."""
        write.inner = self._inner.write(write.target, write.ranges)
        with contextlib.suppress(ServingError):
            await self._inner.poll(write.inner, timeout_s=timeout_s)

    def _corrupted(self, ranges: ByteRanges) -> ByteRanges:
        """The same ranges, but the first byte comes from a place of the region that has another one. The source itself
        stays as it is: it may be read for the digest at the same time."""
        first = ranges[0]
        region = np.frombuffer(
            self._memory.read(first.region, 0, self._memory.regions[first.region].total_bytes),
            np.uint8,
        )
        others = np.flatnonzero(region != region[first.source_offset])
        assert len(others), "all bytes of the region are alike: none can be taken for another"
        changed = first._replace(source_offset=int(others[0]), length=1)
        rest = first._replace(
            source_offset=first.source_offset + 1,
            destination_offset=first.destination_offset + 1,
            length=first.length - 1,
        )
        return ByteRanges.of([changed, *([rest] if rest.length else []), *ranges[1:]])
