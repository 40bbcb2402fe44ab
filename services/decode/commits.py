"""What the router was offered and what it has taken. Knows rounds and lengths; never sees a token or a message."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from common.engine.request import RoundResult
from common.errors import InvalidRequest
from services.decode.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOrder:
    """The router accepts tokens of a round, and of all rounds before it."""

    round: int
    length: int
    """Committed length afterwards."""
    finish: bool


class UncommittedRounds:
    """The rounds of one request that its router has not accepted yet."""

    def __init__(self, length: int) -> None:
        self.committed_length = length
        self.committed_round = 0
        self._offered = length
        self._ends: deque[tuple[int, int]] = deque()  # (round, length after it), oldest first

    @property
    def num_uncommitted(self) -> int:
        """Tokens that were offered and not taken."""
        return self._offered - self.committed_length

    @property
    def last_round(self) -> int:
        return self._ends[-1][0] if self._ends else self.committed_round

    def offer(self, result: RoundResult) -> None:
        """A round was verified and is about to be reported."""
        assert result.base == self._offered, (
            f"round {result.round}: {result.base=} {self._offered=}"
        )
        assert result.round == self.last_round + 1, f"{result.round=} {self.last_round=}"
        self._offered += len(result.token_ids)
        self._ends.append((result.round, self._offered))

    def accept(self, order: CommitOrder) -> bool:
        """Take a commit; False when it says nothing new. Raises InvalidRequest when it names what was not offered."""
        if order.round > self.last_round:
            raise InvalidRequest(
                f"commit of round {order.round}, but the last one offered is {self.last_round}"
            )
        if order.finish:
            if not self.committed_length <= order.length <= self._offered:
                raise InvalidRequest(
                    f"finish at length {order.length}, which is not between the committed {self.committed_length} "
                    f"and the offered {self._offered}"
                )
            self.committed_length = order.length
            return True
        if order.round <= self.committed_round:
            return False
        end = next(end for number, end in self._ends if number == order.round)
        if order.length != end:
            raise InvalidRequest(
                f"commit of round {order.round} at length {order.length}, but it ends at {end}; only a finish may cut"
            )
        while self._ends and self._ends[0][0] <= order.round:
            self._ends.popleft()
        self.committed_round, self.committed_length = order.round, order.length
        return True


class Outbox:
    """Events that wait for one router's stream. All that one engine step puts in are taken out together."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._changed = asyncio.Event()
        self._is_closed = False

    def put(self, event: Event) -> None:
        """Dropped when the stream has ended: its requests are aborted then, and nobody listens."""
        if not self._is_closed:
            self._events.append(event)
            self._changed.set()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()

    async def take(self) -> list[Event]:
        """Everything since the last call, at least one event; empty once closed and drained."""
        while not self._events and not self._is_closed:
            await self._changed.wait()
            self._changed.clear()
        events, self._events = self._events, []
        return events
