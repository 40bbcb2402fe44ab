"""One-sided engines towards receivers in other processes: what arrives, and what is known of a write that does not."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
import torch

from common.errors import TransferFailed
from common.transfer.config import TransferConfig
from common.transfer.engine import TransferEngine, TransferId, WriteTarget
from common.transfer.handoff import HandoffKey
from common.transfer.memory import PoolMemory
from common.transfer.ranges import ByteRange, ByteRanges
from common.types import RequestId
from tests.support.transfer_engines import (
    big_memory,
    engine_params,
    open_engine,
    peer_process,
    transfer_config,
)
from tests.support.waiting import WAIT_S

NUM_PAGES = 512
PAGE_BYTES = 65536
KEY = HandoffKey(request_id=RequestId("r"), epoch=0, reservation_id="x", prefill_generation="g")
TARGET = WriteTarget(address="peer:1", key=KEY, capability=b"")


class Source:
    """Our end: an engine over memory that is filled with one byte at a time."""

    def __init__(self, config: TransferConfig) -> None:
        self.config = config
        self.memory: PoolMemory = big_memory(NUM_PAGES)
        self.engine: TransferEngine = open_engine(config, self.memory)

    def write(self, byte: int, *, num_pages: int = NUM_PAGES) -> TransferId:
        """Send the leading pages, full of a byte, as one range."""
        self.memory.tensors[0].view(-1).view(torch.uint8).fill_(byte)
        whole = ByteRange(
            region=0, source_offset=0, destination_offset=0, length=num_pages * PAGE_BYTES
        )
        return self.engine.write(TARGET, ByteRanges.of([whole]))

    async def arrives(self, transfer: TransferId) -> bool:
        return await self.engine.poll(transfer, timeout_s=WAIT_S)

    async def fails(self, transfer: TransferId) -> None:
        with pytest.raises(TransferFailed):
            await self.arrives(transfer)
        assert await self.engine.cancel(transfer, timeout_s=WAIT_S), "failed, but has not stopped"


@pytest.fixture
async def source(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Source]:
    it = Source(transfer_config(request.param, monkeypatch))
    yield it
    await it.engine.close()


ALL = engine_params("nixl", "nixl-tcp", "mooncake")
STALLING = engine_params("nixl-tcp", "mooncake")
"""With plain nixl, the kernel copies for a receiver that does not run."""


@pytest.mark.parametrize("source", ALL, indirect=True)
async def test_a_peer_that_dies_is_known_to_be_gone_and_its_successor_is_written_to(
    source: Source,
) -> None:
    """Both under the same address, as a process that is restarted on its port."""
    with pytest.raises(TransferFailed, match=r"has not met peer:1"):
        await source.arrives(source.write(1))
    for byte in (1, 2):
        async with peer_process(source.config, num_pages=NUM_PAGES) as peer:
            await source.engine.connect(TARGET.address, peer.descriptor, timeout_s=WAIT_S)
            assert await source.arrives(source.write(byte))
            assert set(await peer.first_bytes(NUM_PAGES)) == {byte}
        await source.fails(source.write(9, num_pages=1))
    with pytest.raises(TransferFailed):
        await source.engine.connect(TARGET.address, peer.descriptor, timeout_s=0.5)
    await source.fails(source.write(9, num_pages=1))


@pytest.mark.parametrize("source", STALLING, indirect=True)
async def test_a_write_to_a_stalled_peer_has_not_stopped_before_it_arrived_or_the_peer_died(
    source: Source,
) -> None:
    """A write that was given up lands late, and with what its source then holds: so nobody may be told that it stopped."""
    async with peer_process(source.config, num_pages=NUM_PAGES) as peer:
        await source.engine.connect(TARGET.address, peer.descriptor, timeout_s=WAIT_S)
        peer.pause()
        transfer = source.write(3)
        assert not await source.engine.poll(transfer, timeout_s=0.3)
        assert not await source.engine.cancel(transfer, timeout_s=0.3)
        with pytest.raises(TransferFailed):
            await source.engine.connect(TARGET.address, peer.descriptor, timeout_s=0.3)
        assert not await source.engine.cancel(transfer, timeout_s=0.1), "meeting again ended it"
        peer.resume()
        assert await source.engine.cancel(transfer, timeout_s=WAIT_S)
        assert set(await peer.first_bytes(NUM_PAGES)) == {3}
        # Its death is the other proof.
        await source.engine.connect(TARGET.address, peer.descriptor, timeout_s=WAIT_S)
        peer.pause()
        transfer = source.write(4)
        assert not await source.engine.poll(transfer, timeout_s=0.2)
        await peer.kill()
        await source.fails(transfer)


@pytest.mark.parametrize("name", engine_params("grpc", "nixl", "nixl-tcp", "mooncake"))
async def test_a_receiver_to_which_nothing_comes_leaves_its_core_to_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured against ourselves: on a machine however busy, a thread that spins gets about as much as we do meanwhile."""
    async with peer_process(transfer_config(name, monkeypatch), num_pages=1) as peer:
        before, until = peer.cpu_s, time.process_time() + 0.5
        while time.process_time() < until:
            pass
        assert peer.cpu_s - before < 0.3 * 0.5
