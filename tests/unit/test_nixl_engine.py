"""What the NIXL engine makes of NIXL's answers, whatever they are: a library that says what the test wants, and no bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import TransferFailed
from common.transfer import nixl_engine
from common.transfer.engine import TransferId, WriteTarget
from common.transfer.handoff import HandoffKey
from common.transfer.meeting import EngineDescriptor
from common.transfer.nixl_engine import INLINE_BYTES, NixlTransferEngine
from common.transfer.ranges import ByteRange, ByteRanges
from common.types import RequestId
from tests.support.transfer_engines import big_memory
from tests.support.waiting import WAIT_S, until

KEY = HandoffKey(request_id=RequestId("r"), epoch=0, reservation_id="x", prefill_generation="g")
TARGET = WriteTarget(address="peer:1", key=KEY, capability=b"")
SMALL, LARGE = INLINE_BYTES, INLINE_BYTES + 1


class NixlError(Exception):
    """What the library raises."""


class Agent:
    """Says of every write what `state` is, or raises it; a large one is held until `may_post`."""

    def __init__(self) -> None:
        self.state: str | NixlError = "DONE"
        self.posted_by: list[str] = []
        """Names of threads."""
        self.handles: set[object] = set()
        """That were not released."""
        self.may_post, self.may_learn = threading.Event(), threading.Event()
        self.may_post.set()
        self.may_learn.set()

    def register_memory(self, tensor: Any) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return b"us"

    def get_new_notifs(self) -> None: ...

    def add_remote_agent(self, endpoint: bytes) -> bytes:
        self.may_learn.wait(WAIT_S)
        return endpoint

    def remove_remote_agent(self, agent: str) -> None: ...

    def get_xfer_descs(self, ends: Any, kind: str) -> Any:
        return ends[0]  # as NIXL does, which looks what they are

    def initialize_xfer(self, kind: str, source: Any, destination: Any, agent: str) -> object:
        handle = object()
        self.handles.add(handle)
        return handle

    def transfer(self, handle: object) -> str:
        self.may_post.wait(WAIT_S)
        self.posted_by.append(threading.current_thread().name)
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: object) -> str:
        if isinstance(self.state, NixlError):
            self.handles.discard(handle)  # as NIXL's own handles, which nobody holds any more
            raise self.state
        return self.state

    def release_xfer_handle(self, handle: object) -> None:
        self.handles.remove(handle)


class Library:
    errors = (NixlError,)

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def agent(self, name: str) -> Agent:
        return self._agent


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
async def engine(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[NixlTransferEngine]:
    """It has met its peer."""
    monkeypatch.setattr(nixl_engine, "NixlLibrary", lambda: Library(agent))
    it = NixlTransferEngine(big_memory(1))
    await meet(it, TARGET.address)
    agent.posted_by.clear()
    yield it
    await it.close()
    assert not agent.handles


async def meet(engine: NixlTransferEngine, address: str, *, timeout_s: float = WAIT_S) -> None:
    descriptor = EngineDescriptor(name="nixl", endpoint=address.encode(), region_addresses=(0,))
    await engine.connect(address, descriptor, timeout_s=timeout_s)


async def is_not_met_again(engine: NixlTransferEngine) -> None:
    """What is under way to it would be lost sight of."""
    with pytest.raises(TransferFailed, match="1 writes to peer:1 have not ended"):
        await meet(engine, TARGET.address, timeout_s=0.02)


def write(engine: NixlTransferEngine, num_bytes: int) -> TransferId:
    whole = ByteRange(region=0, source_offset=0, destination_offset=0, length=num_bytes)
    return engine.write(TARGET, ByteRanges.of([whole]))


async def arrives(engine: NixlTransferEngine, transfer: TransferId) -> bool:
    return await engine.poll(transfer, timeout_s=WAIT_S)


async def fails(engine: NixlTransferEngine, transfer: TransferId, why: str) -> None:
    with pytest.raises(TransferFailed, match=why):
        await arrives(engine, transfer)
    assert await engine.cancel(transfer, timeout_s=0), "failed, but has not stopped"


async def test_a_small_write_is_over_when_the_call_returns(
    engine: NixlTransferEngine, agent: Agent
) -> None:
    transfer = write(engine, SMALL)
    assert agent.posted_by == [threading.current_thread().name]
    assert not agent.handles
    assert await arrives(engine, transfer)


async def test_a_large_write_is_posted_beside_the_event_loop(
    engine: NixlTransferEngine, agent: Agent
) -> None:
    agent.may_post.clear()
    transfer = write(engine, LARGE)
    assert not await engine.poll(transfer, timeout_s=0)
    await is_not_met_again(engine)
    agent.may_post.set()
    assert await arrives(engine, transfer)
    (poster,) = agent.posted_by
    assert poster.startswith("nixl-post")


async def test_a_small_write_does_not_wait_for_nixl_on_the_event_loop(
    engine: NixlTransferEngine, agent: Agent
) -> None:
    """While another thread is inside NIXL, which lets one in at a time, posting waits; so it does that elsewhere."""
    agent.may_learn.clear()
    meeting = asyncio.create_task(meet(engine, "peer:2"))
    await until(lambda: engine._num_on_thread > 0)
    transfer = write(engine, SMALL)
    assert not agent.posted_by
    agent.may_learn.set()
    await meeting
    assert await arrives(engine, transfer)
    assert all(name.startswith("nixl-post") for name in agent.posted_by)


async def test_a_small_write_that_is_not_over_is_followed_to_its_end(
    engine: NixlTransferEngine, agent: Agent
) -> None:
    agent.state = "PROC"
    transfer = write(engine, SMALL)
    assert not await engine.poll(transfer, timeout_s=0)
    assert not await engine.cancel(transfer, timeout_s=0), "what is under way has not stopped"
    await is_not_met_again(engine)
    agent.state = "DONE"
    assert await arrives(engine, transfer)
    assert not agent.handles
    await meet(engine, TARGET.address)


async def test_a_peer_is_met_again_when_what_is_under_way_to_it_has_ended(
    engine: NixlTransferEngine, agent: Agent
) -> None:
    """Somebody whose hand-off failed has the pair met again, while those of others may go on."""
    agent.state = "PROC"
    transfer = write(engine, SMALL)
    meeting = asyncio.create_task(meet(engine, TARGET.address, timeout_s=10 * WAIT_S))
    assert not await engine.poll(transfer, timeout_s=0.01)
    assert not meeting.done()
    agent.state = "DONE"
    async with asyncio.timeout(WAIT_S):
        await meeting
    assert await arrives(engine, transfer)


@pytest.mark.parametrize("failure", ["ERR", NixlError("the peer is gone")])
@pytest.mark.parametrize("begins_well", [False, True])
@pytest.mark.parametrize("num_bytes", [SMALL, LARGE])
async def test_a_write_that_fails_says_so_when_it_is_asked_for(
    engine: NixlTransferEngine,
    agent: Agent,
    num_bytes: int,
    begins_well: bool,
    failure: str | NixlError,
) -> None:
    agent.state = "PROC" if begins_well else failure
    transfer = write(engine, num_bytes)
    if begins_well:
        assert not await engine.poll(transfer, timeout_s=0)
    agent.state = failure
    await fails(engine, transfer, "writing to peer:1 failed")
    assert not agent.handles
    agent.state = "DONE"
    await meet(engine, TARGET.address)


async def test_a_peer_that_was_not_met_is_not_written_to(
    engine: NixlTransferEngine, agent: Agent
) -> None:
    await engine._forget(engine._peers[TARGET.address])
    await fails(engine, write(engine, SMALL), "nixl has not met peer:1")
    assert not agent.posted_by


async def test_nothing_to_write_is_written_at_once(
    engine: NixlTransferEngine, agent: Agent
) -> None:
    assert await arrives(engine, engine.write(TARGET, ByteRanges.of([])))
    assert not agent.posted_by, "NIXL cannot be asked for nothing"


async def test_an_engine_that_is_closed_keeps_no_handle_of_what_is_under_way(
    engine: NixlTransferEngine, agent: Agent
) -> None:
    agent.state = "PROC"
    assert not await engine.poll(write(engine, SMALL), timeout_s=0)
    await engine.close()
    assert not agent.handles
