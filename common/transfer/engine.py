"""What moves bytes between two pools. Knows ranges and peers; never what a row means.

Control messages travel by gRPC whatever the engine; an engine moves only what `ByteRange`s name. Every implementation
is one-sided in spirit: the sender writes into the receiver's memory, the receiver has only granted it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType, Protocol

from common.transfer.handoff import HandoffKey
from common.transfer.meeting import EngineDescriptor
from common.transfer.ranges import ByteRanges

TransferId = NewType("TransferId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTarget:
    """The receiving end of a hand-off."""

    address: str
    """Control address of the receiver, host:port; the peer that was connected under it."""
    key: HandoffKey
    capability: bytes
    """Secret of the reservation; an engine without a server of its own has no use for it."""


class TransferEngine(Protocol):
    """Reads and writes the pool that it was made with, which must outlive it. Called from one event loop; nothing here
    blocks it for longer than a millisecond or so."""

    name: str
    """As it is negotiated, for example "grpc"."""

    is_one_sided: bool
    """True when the receiver cannot keep bytes out that a sender still writes: memory of an ended hand-off then stays in
    quarantine until the sender has stopped."""

    @property
    def descriptor(self) -> EngineDescriptor:
        """For peers; valid until `close`."""

    async def connect(
        self, address: str, descriptor: EngineDescriptor, *, timeout_s: float
    ) -> None:
        """Meet the receiver at a control address, for as long as it lives, and see that bytes arrive there.

        Another descriptor than before for the same address means another process: the connection to the old one is torn
        down. Raises TransferFailed when the peer cannot be written to this way, and ContractMismatch when its
        descriptor does not describe our regions; it is unknown then.
        """

    def receive(self) -> Callable[[], None]:
        """A peer may write to us from now on until the returned function is called, once.

        Some engines need the receiver's help for bytes to come in, and give it only meanwhile.
        """

    def write(self, target: WriteTarget, ranges: ByteRanges) -> TransferId:
        """Start copying ranges of our memory into a connected peer's; what goes wrong at once is told by `poll`, too.

        The source bytes must neither change nor be given to another request until `poll` or `cancel` returned True.
        """

    async def poll(self, transfer: TransferId, *, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for a write to end; True when every byte has arrived, and the id is forgotten then.

        Raises TransferFailed, or what the peer refused with, when the write failed. Whether it has also stopped,
        `cancel` says.
        """

    async def cancel(self, transfer: TransferId, *, timeout_s: float) -> bool:
        """Give a write up. True when it certainly reads and writes nothing any more; the id is forgotten then.

        False means that it may still be under way after `timeout_s`: both sides keep the memory out of use, and ask
        again. A write to a peer that is gone stops. Ids that are not known have stopped.
        """

    async def close(self) -> None:
        """Stop everything. Writes that were not polled to their end are given up."""
