"""Writes that stand still while their bytes travel: some are out, and of none can its engine say that it has arrived.

Knows where each engine can be held. Plain NIXL and Mooncake copy in code that nobody can stop half way.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol, cast
from unittest import mock

from common.rpc import transfer_stream
from tests.support.engines import DirectEngine
from tests.support.waiting import until

HOLDABLE = ("grpc", "direct", "nixl-tcp")


class MidWrite(Protocol):
    """A hold on the writes of one sender to one receiver."""

    def held(self, begin: Callable[[], None]) -> contextlib.AbstractAsyncContextManager[None]:
        """What `begin` sets off stands in the middle of a write inside the block, and goes on after it."""


def mid_write(engine: str, sender: Any, receiver: Any) -> MidWrite:
    """The hold that suits an engine, to be made before anything was sent."""
    if engine == "grpc":
        return _BetweenMessages()
    if engine == "direct":
        return _BetweenRanges(sender)
    return _UntilTheReceiverLooks(sender, receiver)


class _BetweenMessages:
    """The peer has one message of a stream, and waits for the next."""

    @contextlib.asynccontextmanager
    async def held(self, begin: Callable[[], None]) -> AsyncIterator[None]:
        write_all, is_out, may_go_on = transfer_stream._write_all, asyncio.Event(), asyncio.Event()

        async def haltingly(call: Any, messages: Iterator[bytes]) -> None:
            await call.write(next(messages))
            is_out.set()
            await may_go_on.wait()
            await write_all(call, messages)

        with (
            mock.patch.object(transfer_stream, "MESSAGE_BYTES", 256),
            mock.patch.object(transfer_stream, "_write_all", haltingly),
        ):
            begin()
            await until(is_out.is_set)
            yield
            may_go_on.set()


class _BetweenRanges:
    """Some ranges are copied, others are not."""

    def __init__(self, sender: DirectEngine) -> None:
        self._sender = sender

    @contextlib.asynccontextmanager
    async def held(self, begin: Callable[[], None]) -> AsyncIterator[None]:
        is_out, may_go_on = asyncio.Event(), asyncio.Event()

        async def halt() -> None:
            is_out.set()
            await may_go_on.wait()

        with mock.patch.object(self._sender, "between_ranges", halt):
            begin()
            await until(is_out.is_set)
            yield
            may_go_on.set()


class _UntilTheReceiverLooks:
    """Everything is sent, and the receiver's process, which has to take it, does not run."""

    def __init__(self, sender: Any, receiver: Any) -> None:
        self._sender = sender
        self._looks = _Looks(receiver._agent)
        receiver._receiver._agent = self._looks

    @contextlib.asynccontextmanager
    async def held(self, begin: Callable[[], None]) -> AsyncIterator[None]:
        with self._looks.may_be_taken:
            begin()
            await until(lambda: self._num_under_way == 1)
            yield
            assert self._num_under_way == 1, "the write was over before the receiver looked"

    @property
    def _num_under_way(self) -> int:
        return sum(peer.num_writes for peer in self._sender._peers.values())


class _Looks:
    """A receiver's agent, which looks only while it is not held."""

    def __init__(self, agent: Any) -> None:
        self.may_be_taken = threading.Lock()
        self._agent = agent

    def get_new_notifs(self) -> Any:
        with self.may_be_taken:
            return cast(Any, self._agent.get_new_notifs())
