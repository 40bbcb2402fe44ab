"""NIXL is a library that answers when it likes; whoever asks it has a deadline all the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from common.errors import TransferFailed
from common.transfer import nixl_engine
from common.transfer.nixl_engine import NixlTransferEngine
from tests.support.transfer_engines import big_memory, engine_params
from tests.support.waiting import WAIT_S, in_time


class SlowAgent:
    """Passes everything on to an agent, and keeps whoever calls `slow` until told."""

    def __init__(self, agent: Any, slow: str) -> None:
        self._agent = agent
        self._slow = slow
        self.goes_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._agent, name)
        if name != self._slow:
            return method

        def late(*arguments: Any) -> Any:
            self.goes_on.wait(WAIT_S)
            return method(*arguments)

        return late


@pytest.fixture(params=engine_params("nixl"))
def engines() -> Iterator[tuple[NixlTransferEngine, NixlTransferEngine]]:
    yield NixlTransferEngine(big_memory(1)), NixlTransferEngine(big_memory(1))


async def test_a_peer_of_which_nixl_does_not_learn_is_not_waited_for_and_known_when_it_has(
    engines: tuple[NixlTransferEngine, NixlTransferEngine],
) -> None:
    ours, theirs = engines
    agent = SlowAgent(ours._agent, "add_remote_agent")
    cast(Any, ours)._agent = agent
    stop_receiving = theirs.receive()
    with pytest.raises(TransferFailed, match="nixl has not answered in"):
        await in_time(ours.connect("peer:1", theirs.descriptor, timeout_s=0.05), WAIT_S)
    agent.goes_on.set()
    await in_time(ours.connect("peer:1", theirs.descriptor, timeout_s=WAIT_S), WAIT_S)
    stop_receiving()
    await asyncio.gather(ours.close(), theirs.close())


async def test_an_engine_whose_library_does_not_return_is_closed_all_the_same(
    engines: tuple[NixlTransferEngine, NixlTransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_engine, "CLOSE_TIMEOUT_S", 0.05)
    ours, theirs = engines
    stop_receiving = theirs.receive()
    await in_time(ours.connect("peer:1", theirs.descriptor, timeout_s=WAIT_S), WAIT_S)
    agent = SlowAgent(ours._agent, "remove_remote_agent")
    cast(Any, ours)._agent = agent
    await in_time(ours.close(), WAIT_S)
    agent.goes_on.set()
    stop_receiving()
    await theirs.close()
