"""What moves bytes between two pools. Knows ranges and peers; never what a row means.

Control messages travel by gRPC whatever the engine; an engine moves only what `ByteRange`s name. Every implementation
is one-sided in spirit: the sender writes into the receiver's memory, the receiver has only granted it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from common.transfer.handoff import HandoffKey
from common.transfer.memory import PoolMemory
from common.transfer.plan import ByteRange

TransferId = NewType("TransferId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTarget:
    """The receiving end of a hand-off."""

    address: str
    """Control address of the receiver, host:port."""
    descriptor: bytes
    """What the receiver's engine said in `describe`."""
    key: HandoffKey
    capability: bytes
    """Secret of the reservation; an engine without a server of its own has no use for it."""


class TransferEngine(Protocol):
    """Called from one event loop; nothing here blocks it."""

    name: str
    """As it is negotiated, for example "grpc"."""

    def register(self, memory: PoolMemory) -> None:
        """Make a pool's memory readable and writable by this engine; called once, before anything else.

        The pool stays the owner and must outlive the engine.
        """

    def describe(self) -> bytes:
        """What a peer's engine must know to write here; opaque to everybody else, valid until `close`."""

    def write(self, target: WriteTarget, ranges: Sequence[ByteRange]) -> TransferId:
        """Start copying ranges of our memory into the target's.

        The source bytes must neither change nor be given to another request until `poll` returned True or raised, or
        `cancel` returned True.
        """

    async def poll(self, transfer: TransferId, *, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for a write to end; True when every byte has arrived, and the id is forgotten then.

        Raises ServingError, TransferFailed as a rule, when the write failed and has stopped.
        """

    async def cancel(self, transfer: TransferId, *, timeout_s: float) -> bool:
        """Give a write up. True when it certainly reads and writes nothing any more; the id is forgotten then.

        False means that it may still be under way after `timeout_s`: both sides keep the memory out of use, and ask again.
        """

    async def close(self) -> None:
        """Stop everything. Writes that were not polled to their end are given up."""
