"""The transfer engine over Mooncake: TCP here, RDMA and Ascend's links through its other builds. Knows addresses; no rows.

Mooncake's synchronous calls spin, so writes are submitted and asked about. It listens on all interfaces and knows no
secrets: whoever reaches its ports can write to the pool, which is why it is used only where it was asked for.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from common.config import native_setting
from common.errors import ConfigError, TransferFailed
from common.transfer.engine import TransferId, WriteTarget
from common.transfer.meeting import PROBE_BYTES, EngineDescriptor
from common.transfer.memory import PoolMemory
from common.transfer.ranges import ByteRanges
from common.transfer.writes import Writes, next_wait_s

NEVER_S = 100_000_000
"""With time-outs, Mooncake calls a write failed whose bytes still land; without them it fails only when its connection is
gone, and has then stopped."""

_PENDING, _DONE = 0, 1

Answer = TypeVar("Answer")
Copy = tuple[int, int, int]
"""Our address, the peer's address, bytes."""


class MooncakeTransferEngine:
    """One Mooncake engine with the whole pool registered. A write cannot be interrupted, only waited for."""

    name = "mooncake"
    is_one_sided = True

    def __init__(self, memory: PoolMemory, *, host: str, protocol: str = "tcp") -> None:
        """`host` is where peers reach this machine. Raises ConfigError when Mooncake cannot be imported or does not start."""
        native_setting("MC_TRANSFER_TIMEOUT", str(NEVER_S))
        native_setting("MC_TCP_PROGRESS_TIMEOUT_SEC", str(NEVER_S))
        native_setting("MC_LOG_LEVEL", "ERROR")
        self._engine = _new_engine(host, protocol)
        self._probe = torch.zeros(2 * PROBE_BYTES, dtype=torch.uint8)
        """First half: what we send. Second half: where peers write."""
        for tensor in (*memory.tensors, self._probe):
            if self._engine.register_memory(tensor.data_ptr(), tensor.nbytes) != 0:
                raise ConfigError(f"Mooncake does not register {tensor.nbytes} bytes of memory")
        self._addresses = [tensor.data_ptr() for tensor in memory.tensors]
        self.descriptor = EngineDescriptor(
            name=self.name,
            endpoint=f"{host}:{self._engine.get_rpc_port()}".encode(),
            region_addresses=tuple(self._addresses),
            probe_address=self._probe.data_ptr() + PROBE_BYTES,
            device=str(memory.tensors[0].device),
        )
        self._peers: dict[str, EngineDescriptor] = {}
        self._writes = Writes()
        self._posts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mooncake-post")

    async def connect(
        self, address: str, descriptor: EngineDescriptor, *, timeout_s: float
    ) -> None:
        descriptor.require_regions(len(self._addresses), peer=address)
        copy = (self._probe.data_ptr(), descriptor.probe_address, PROBE_BYTES)
        probe = self._writes.start(self._transfer(descriptor.endpoint.decode(), [copy]))
        self._peers.pop(address, None)
        if not await self._writes.poll(probe, timeout_s=timeout_s):
            raise TransferFailed(f"mooncake wrote nothing to {address} in {timeout_s} s")
        self._peers[address] = descriptor

    def receive(self) -> Callable[[], None]:
        return lambda: None  # Mooncake's own threads take what comes, asleep otherwise

    def write(self, target: WriteTarget, ranges: ByteRanges) -> TransferId:
        return self._writes.start(self._write(target.address, ranges))

    async def poll(self, transfer: TransferId, *, timeout_s: float) -> bool:
        return await self._writes.poll(transfer, timeout_s=timeout_s)

    async def cancel(self, transfer: TransferId, *, timeout_s: float) -> bool:
        return await self._writes.stop(transfer, timeout_s=timeout_s, interrupts=False)

    async def close(self) -> None:
        await self._writes.close()
        # It waits for its threads, a second or so, and would do that whenever it is found to be garbage.
        await self._on_thread(self._drop)
        self._posts.shutdown()

    async def _write(self, address: str, ranges: ByteRanges) -> None:
        peer = self._peers.get(address)
        if peer is None:
            raise TransferFailed(f"mooncake has not met {address}")
        await self._transfer(
            peer.endpoint.decode(),
            [
                (
                    self._addresses[r.region] + r.source_offset,
                    peer.region_addresses[r.region] + r.destination_offset,
                    r.length,
                )
                for r in ranges
            ],
        )

    async def _transfer(self, endpoint: str, copies: Sequence[Copy]) -> None:
        """Ends when the bytes are there. Raises TransferFailed when they will not all be, and none is under way."""
        began = time.monotonic()
        pending = await self._on_thread(lambda: self._submit(endpoint, copies))
        num_failed = len(copies) - len(pending)
        while pending:
            await asyncio.sleep(next_wait_s(time.monotonic() - began))
            states = await self._on_thread(functools.partial(self._states, pending))
            num_failed += sum(state not in (_PENDING, _DONE) for state in states)
            pending = [
                batch for batch, state in zip(pending, states, strict=True) if state == _PENDING
            ]
        if num_failed:
            raise TransferFailed(
                f"mooncake: {num_failed} of {len(copies)} writes to {endpoint} failed"
            )

    def _submit(self, endpoint: str, copies: Sequence[Copy]) -> list[int]:
        """Ids of what is under way; what was refused has none."""
        submit = self._engine.transfer_submit_write
        return [batch for copy in copies if (batch := submit(endpoint, *copy)) != 0]

    def _states(self, batches: Sequence[int]) -> list[int]:
        return [self._engine.transfer_check_status(batch) for batch in batches]

    def _drop(self) -> None:
        del self._engine

    async def _on_thread(self, function: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._posts, function)


def _new_engine(host: str, protocol: str) -> Any:
    try:
        module: Any = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise ConfigError(
            f"Mooncake cannot be imported ({error}); pip install 'dspark-serving[mooncake]', "
            "and its TCP build needs the system package libibverbs1"
        ) from error
    engine = module.TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
        raise ConfigError(f"Mooncake does not start on {host} with protocol {protocol}")
    return engine
