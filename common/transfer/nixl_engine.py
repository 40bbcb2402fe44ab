"""The transfer engine over NIXL: UCX's shared memory, TCP, RDMA and device memory. Knows addresses; no rows.

NIXL's own progress thread would burn a core, so it stays off. A write is then brought forward by whoever asks for its
end and, over TCP, by its receiver, who has to look.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from common.errors import ConfigError, TransferFailed
from common.transfer.engine import TransferId, WriteTarget
from common.transfer.meeting import PROBE_BYTES, EngineDescriptor
from common.transfer.memory import PoolMemory
from common.transfer.nixl_library import NixlLibrary
from common.transfer.nixl_memory import Descriptors, NixlMemory, NixlPair, host_bytes
from common.transfer.nixl_receiver import NixlReceiver
from common.transfer.ranges import ByteRanges
from common.transfer.writes import Writes, next_wait_s

logger = logging.getLogger(__name__)


INLINE_BYTES = 4 * 1024 * 1024
"""Copied in less than a millisecond, so posted without another thread, which would cost as much again."""

CLOSE_TIMEOUT_S = 5.0

Answer = TypeVar("Answer")


@dataclass(slots=True, kw_only=True)
class _Peer:
    address: str
    agent: str
    descriptor: EngineDescriptor
    pair: NixlPair
    num_writes: int = 0
    """Under way."""
    write_ended: asyncio.Event = field(default_factory=asyncio.Event)


class NixlTransferEngine:
    """One NIXL agent with the whole pool registered.

    A write that fails has stopped: NIXL fails it when the connection is gone. One that does not end can only be waited
    for, because a released handle goes on writing.
    """

    name = "nixl"
    is_one_sided = True

    def __init__(self, memory: PoolMemory) -> None:
        """Raises ConfigError when NIXL cannot be imported, does not start or cannot reach the pool's memory."""
        self._nixl = NixlLibrary()
        self._memory = memory
        # Another name in every process: a restarted peer is another agent.
        self._agent = self._nixl.agent(f"dspark-{secrets.token_hex(8)}")
        self._probe = torch.zeros(2 * PROBE_BYTES, dtype=torch.uint8)
        """First half: what we send. Second half: where peers write."""
        for tensor in (*memory.tensors, self._probe):
            try:
                self._agent.register_memory(tensor)
            except self._nixl.errors as error:
                raise ConfigError(
                    f"NIXL does not register memory of device {tensor.device}: {error}"
                ) from error
        addresses, device = [t.data_ptr() for t in memory.tensors], str(memory.tensors[0].device)
        self._ours = NixlMemory(addresses, device)
        self.descriptor = EngineDescriptor(
            name=self.name,
            endpoint=self._agent.get_agent_metadata(),
            region_addresses=tuple(addresses),
            probe_address=self._probe.data_ptr() + PROBE_BYTES,
            device=device,
        )
        self._peers: dict[str, _Peer] = {}
        self._writes = Writes()
        # Posting may copy everything before it returns, which must not hold the event loop up.
        self._posts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nixl-post")
        self._num_on_thread = 0
        self._calls: set[asyncio.Task[Any]] = set()
        """Into NIXL, that have not returned."""
        self._receiver = NixlReceiver(self._agent, self._nixl.errors)

    async def connect(
        self, address: str, descriptor: EngineDescriptor, *, timeout_s: float
    ) -> None:
        descriptor.require_regions(len(self._ours.addresses), peer=address)
        peer = await self._in_time(self._known(address, descriptor), timeout_s)
        await self._drained(peer, timeout_s)
        if peer.num_writes:
            # Tearing the connection down would end them here, but what is in its buffers would still arrive.
            raise TransferFailed(f"nixl: {peer.num_writes} writes to {address} have not ended")
        probe = self._writes.start(
            self._transfer(
                peer,
                host_bytes(self._probe.data_ptr(), PROBE_BYTES),
                host_bytes(descriptor.probe_address, PROBE_BYTES),
            )
        )
        try:
            if await self._writes.poll(probe, timeout_s=timeout_s):
                return
        except TransferFailed:
            await self._in_time(self._forget(peer), timeout_s)
            raise
        await self._in_time(self._forget(peer), timeout_s)
        raise TransferFailed(f"nixl wrote nothing to {address} in {timeout_s} s")

    def receive(self) -> Callable[[], None]:
        return self._receiver.receive()

    def write(self, target: WriteTarget, ranges: ByteRanges) -> TransferId:
        peer = self._peers.get(target.address)
        if peer is None:
            return self._writes.ended(TransferFailed(f"nixl has not met {target.address}"))
        if not ranges:
            return self._writes.ended()  # NIXL cannot be asked for nothing
        source, destination = peer.pair.descriptors(ranges)
        if ranges.num_bytes > INLINE_BYTES or self._num_on_thread:
            return self._writes.start(self._transfer(peer, source, destination))
        try:
            handle, state = self._post(peer, source, destination)
        except self._nixl.errors as error:
            return self._writes.ended(_failed(peer, error))
        if state == "DONE":
            return self._writes.ended()
        return self._writes.start(self._follow(peer, handle, state))

    async def poll(self, transfer: TransferId, *, timeout_s: float) -> bool:
        return await self._writes.poll(transfer, timeout_s=timeout_s)

    async def cancel(self, transfer: TransferId, *, timeout_s: float) -> bool:
        return await self._writes.stop(transfer, timeout_s=timeout_s, interrupts=False)

    async def close(self) -> None:
        await self._writes.close()
        with contextlib.suppress(TransferFailed):
            await self._in_time(self._forget_all(), CLOSE_TIMEOUT_S)
        await asyncio.to_thread(self._receiver.close)
        self._posts.shutdown(wait=not self._calls, cancel_futures=True)

    def _post(self, peer: _Peer, source: Descriptors, destination: Descriptors) -> tuple[Any, str]:
        """(handle, state). Where the kernel copies, most writes are done when this returns."""
        handle = self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(*source),
            self._agent.get_xfer_descs(*destination),
            peer.agent,
        )
        return handle, self._settled(handle, self._agent.transfer(handle))

    async def _transfer(self, peer: _Peer, source: Descriptors, destination: Descriptors) -> None:
        """Post on the thread, and end when the bytes are there. Raises TransferFailed when they will not be."""
        with self._under_way(peer):
            handle, state = await self._on_thread(lambda: self._post(peer, source, destination))
        await self._follow(peer, handle, state)

    async def _follow(self, peer: _Peer, handle: Any, state: str) -> None:
        """From posting to the end of `_transfer`."""
        began = time.monotonic()
        with self._under_way(peer):
            try:
                while state == "PROC":
                    await asyncio.sleep(next_wait_s(time.monotonic() - began))
                    state = await self._on_thread(
                        lambda: self._settled(handle, self._agent.check_xfer_state(handle))
                    )
            finally:
                if state == "PROC":
                    self._posts.submit(self._release, handle)
        if state != "DONE":
            raise _failed(peer, state)

    @contextlib.contextmanager
    def _under_way(self, peer: _Peer) -> Iterator[None]:
        """Raises TransferFailed for what NIXL raises."""
        peer.num_writes += 1
        try:
            yield
        except self._nixl.errors as error:
            raise _failed(peer, error) from error
        finally:
            peer.num_writes -= 1
            peer.write_ended.set()

    def _settled(self, handle: Any, state: str) -> str:
        """The state; a handle whose write has ended is released at once, for another thread would be waited for."""
        if state != "PROC":
            self._release(handle)
        return state

    def _release(self, handle: Any) -> None:
        with contextlib.suppress(*self._nixl.errors):
            self._agent.release_xfer_handle(handle)

    async def _known(self, address: str, descriptor: EngineDescriptor) -> _Peer:
        known = self._peers.get(address)
        if known is not None and known.descriptor.endpoint != descriptor.endpoint:
            # Another process listens there, so the one before is gone and so are its writes.
            await self._forget(known)
        return self._peers.get(address) or await self._learn(address, descriptor)

    async def _learn(self, address: str, descriptor: EngineDescriptor) -> _Peer:
        try:
            agent = await self._on_thread(lambda: self._agent.add_remote_agent(descriptor.endpoint))
        except self._nixl.errors as error:
            raise TransferFailed(f"nixl does not understand {address}: {error}") from error
        name = agent.decode() if isinstance(agent, bytes) else str(agent)
        peer = self._peers[address] = _Peer(
            address=address,
            agent=name,
            descriptor=descriptor,
            pair=NixlPair(self._ours, NixlMemory(descriptor.region_addresses, descriptor.device)),
        )
        return peer

    async def _forget(self, peer: _Peer) -> None:
        self._peers.pop(peer.address, None)
        try:
            await self._on_thread(lambda: self._agent.remove_remote_agent(peer.agent))
        except self._nixl.errors as error:
            logger.debug("nixl: the agent of %s was gone already: %s", peer.address, error)

    async def _forget_all(self) -> None:
        for peer in list(self._peers.values()):
            await self._forget(peer)

    async def _drained(self, peer: _Peer, timeout_s: float) -> None:
        """Return when nothing is under way to a peer any more, or in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while peer.num_writes:
                    peer.write_ended.clear()
                    await peer.write_ended.wait()

    async def _in_time(self, work: Coroutine[Any, Any, Answer], timeout_s: float) -> Answer:
        """Raises TransferFailed when NIXL does not return. It cannot be interrupted, so the work goes on and what it finds
        out late is there for the next try."""
        call = asyncio.create_task(work)
        self._calls.add(call)
        call.add_done_callback(self._has_returned)
        done, _ = await asyncio.wait([call], timeout=timeout_s)
        if not done:
            raise TransferFailed(f"nixl has not answered in {timeout_s} s")
        return call.result()

    def _has_returned(self, call: asyncio.Task[Any]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # nobody may be left to hear it

    async def _on_thread(self, function: Callable[[], Answer]) -> Answer:
        self._num_on_thread += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._posts, function)
        finally:
            self._num_on_thread -= 1


def _failed(peer: _Peer, why: object) -> TransferFailed:
    return TransferFailed(f"nixl: writing to {peer.address} failed: {why}")
