"""Transfer engines for tests: those that are installed, one that writes straight into its peer's memory, and a hold on
whichever of them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

from common.errors import ServingError, TransferFailed
from common.transfer.config import EngineChoice, TransferConfig
from common.transfer.engine import TransferEngine, TransferId, WriteTarget
from common.transfer.engines import Engines, open_engines
from common.transfer.grpc_engine import GrpcTransferEngine
from common.transfer.meeting import EngineDescriptor
from common.transfer.memory import PoolMemory
from common.transfer.ranges import ByteRanges
from common.transfer.writes import Writes
from services.decode import app as decode_app
from services.prefill import app as prefill_app
from tests.support.waiting import WAIT_S

Wrap = Callable[[TransferEngine, PoolMemory], TransferEngine]


def _is_importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


ONE_SIDED = (
    "direct",
    *(["nixl"] if _is_importable("nixl_cu12") or _is_importable("nixl") else []),
    *(["mooncake"] if _is_importable("mooncake.engine") else []),
)
ALL = ("grpc", *ONE_SIDED)
"""Engines that can be used here."""
INSTALLED = tuple(name for name in ALL if name != "direct")
"""Without the one that is of these tests."""
BY_TCP = tuple(f"{name}-tcp" for name in ONE_SIDED if name == "nixl")
"""NIXL as it is between machines without RDMA: the receiver has to help."""


class DirectEngine:
    """One-sided without doubt: the sender copies into the receiver's pool, which can only look on. Both are in this process."""

    name = "direct"
    is_one_sided = True

    def __init__(self, memory: PoolMemory, wire: dict[bytes, PoolMemory]) -> None:
        self.descriptor = EngineDescriptor(name=self.name, endpoint=secrets.token_bytes(8))
        wire[self.descriptor.endpoint] = memory
        self._memory = memory
        self._wire = wire
        self._peers: dict[str, PoolMemory] = {}
        self._writes = Writes()

    async def between_ranges(self) -> None:
        """Whatever else is to be done in this process is done now."""
        await asyncio.sleep(0)

    async def connect(
        self, address: str, descriptor: EngineDescriptor, *, timeout_s: float
    ) -> None:
        self._peers[address] = self._wire[descriptor.endpoint]

    def receive(self) -> Callable[[], None]:
        return lambda: None

    def write(self, target: WriteTarget, ranges: ByteRanges) -> TransferId:
        return self._writes.start(self._write(target, ranges))

    async def poll(self, transfer: TransferId, *, timeout_s: float) -> bool:
        return await self._writes.poll(transfer, timeout_s=timeout_s)

    async def cancel(self, transfer: TransferId, *, timeout_s: float) -> bool:
        return await self._writes.stop(transfer, timeout_s=timeout_s, interrupts=False)

    async def close(self) -> None:
        await self._writes.close()

    async def _write(self, target: WriteTarget, ranges: ByteRanges) -> None:
        peer = self._peers.get(target.address)
        if peer is None:
            raise TransferFailed(f"direct has not met {target.address}")
        for r in ranges:
            payload = self._memory.read(r.region, r.source_offset, r.length)
            peer.write(r.region, r.destination_offset, payload)
            await self.between_ranges()


class HeldEngine:
    """Passes on to another engine, but after `hold` only half of the next write, until `release`.

    `num_denials` times it then cannot say that this write has stopped, and before it can, the other half lands.
    """

    def __init__(self, inner: TransferEngine) -> None:
        self.name = inner.name
        self.is_one_sided = inner.is_one_sided
        self.is_half_way = asyncio.Event()
        self.num_denials = 0
        self.inner = inner
        self._holds_next = False
        self._may_go_on = asyncio.Event()
        self._writes = Writes()
        self._under_way: dict[TransferId, list[TransferId]] = {}
        self._held: dict[TransferId, tuple[WriteTarget, ByteRanges]] = {}
        """What is left of held writes."""

    @property
    def descriptor(self) -> EngineDescriptor:
        return self.inner.descriptor

    def hold(self, *, num_denials: int = 0) -> None:
        self._holds_next = True
        self.num_denials = num_denials
        self.is_half_way.clear()
        self._may_go_on.clear()

    def release(self) -> None:
        """Let what is held go on as if nothing had been."""
        self._held.clear()
        self._may_go_on.set()

    async def connect(
        self, address: str, descriptor: EngineDescriptor, *, timeout_s: float
    ) -> None:
        await self.inner.connect(address, descriptor, timeout_s=timeout_s)

    def receive(self) -> Callable[[], None]:
        return self.inner.receive()

    def write(self, target: WriteTarget, ranges: ByteRanges) -> TransferId:
        under_way: list[TransferId] = []
        is_held, self._holds_next = self._holds_next, False
        half = len(ranges) // 2
        transfer = self._writes.start(
            self._halves(target, ranges, half, under_way)
            if is_held
            else self._through(target, ranges, under_way)
        )
        self._under_way[transfer] = under_way
        if is_held:
            self._held[transfer] = (target, ranges[half:])
        return transfer

    async def poll(self, transfer: TransferId, *, timeout_s: float) -> bool:
        return await self._writes.poll(transfer, timeout_s=timeout_s)

    async def cancel(self, transfer: TransferId, *, timeout_s: float) -> bool:
        if transfer in self._held and self.num_denials > 0:
            self.num_denials -= 1
            return False
        if not await self._writes.stop(transfer, timeout_s=timeout_s, interrupts=True):
            return False
        under_way = self._under_way.get(transfer, [])
        if transfer in self._held:
            under_way.append(self.inner.write(*self._held.pop(transfer)))
            with contextlib.suppress(ServingError):
                await self.inner.poll(under_way[-1], timeout_s=timeout_s)
        stopped = [await self.inner.cancel(inner, timeout_s=timeout_s) for inner in under_way]
        return all(stopped)

    async def close(self) -> None:
        await self._writes.close()
        await self.inner.close()

    async def _halves(
        self,
        target: WriteTarget,
        ranges: ByteRanges,
        half: int,
        under_way: list[TransferId],
    ) -> None:
        await self._through(target, ranges[:half], under_way)
        self.is_half_way.set()
        await self._may_go_on.wait()
        await self._through(target, ranges[half:], under_way)

    async def _through(
        self, target: WriteTarget, ranges: ByteRanges, under_way: list[TransferId]
    ) -> None:
        if ranges:
            under_way.append(self.inner.write(target, ranges))
            while not await self.inner.poll(under_way[-1], timeout_s=1.0):
                pass


@contextlib.contextmanager
def using(engine: str, wrap: Wrap | None = None) -> Iterator[None]:
    """Workers that are built in this block use this engine; prefill workers the wrapped one."""
    wire: dict[bytes, PoolMemory] = {}
    name, _, link = engine.partition("-")

    def open_here(config: TransferConfig, memory: PoolMemory, grpc: GrpcTransferEngine) -> Engines:
        if name == "direct":
            by_name: dict[str, TransferEngine] = {"direct": DirectEngine(memory, wire)}
            return Engines(choice="auto", wanted="direct", by_name=by_name, missing={})
        choice: EngineChoice = "nixl" if name == "nixl" else "mooncake"
        config = replace(
            config,
            engine="grpc" if name == "grpc" else choice,
            connect_timeout_s=WAIT_S,
        )
        return open_engines(config, memory, grpc)

    def open_wrapped(
        config: TransferConfig, memory: PoolMemory, grpc: GrpcTransferEngine
    ) -> Engines:
        engines = open_here(config, memory, grpc)
        assert engines.wanted == name, engines
        if wrap is None:
            return engines
        wrapped = {name: wrap(each, memory) for name, each in engines.by_name.items()}
        return replace(engines, by_name=wrapped)

    with (
        mock.patch.dict(os.environ, {"UCX_TLS": link} if link else {}),
        mock.patch.object(decode_app, "open_engines", open_here),
        mock.patch.object(prefill_app, "open_engines", open_wrapped),
    ):
        yield
