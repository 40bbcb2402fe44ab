"""Who owns which memory of a device. Knows kinds, owners and bytes; allocates nothing.

Every long-lived buffer is entered once, under one owner: what is in the ledger is what a worker holds for as long as it
lives, and what is not is the passing need of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from common.claims import Claim, MemoryKind, RankMemory


class Ledger:
    """The long-lived memory of one device in one process, and what the process copies to host memory for good."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._claims: dict[int, Claim] = {}
        """By address of the memory."""
        self._parts: dict[int, Claim] = {}
        """Of buffers that two owners share, the second one's."""

    def claim(self, owner: str, kind: MemoryKind, tensors: Iterable[torch.Tensor]) -> None:
        """Enter memory of `tensors`; views of one buffer count once. A second owner of a buffer is our mistake."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                continue
            assert tensor.device == self._device_of(kind), (
                f"{owner} claims memory of {tensor.device}"
            )
            claim = Claim(owner=owner, kind=kind, num_bytes=storage.nbytes())
            other = self._claims.setdefault(storage.data_ptr(), claim)
            assert (other.owner, other.kind) == (owner, kind), (
                f"{storage.nbytes()} bytes of {kind.value} are claimed by {owner} and by {other.owner} "
                f"as {other.kind.value}"
            )

    def claim_part(self, owner: str, kind: MemoryKind, part: torch.Tensor) -> None:
        """Enter a view of a buffer under an owner of its own; the buffer's owner has that much less from now on."""
        address = part.untyped_storage().data_ptr()
        whole = self._claims[address]
        assert address not in self._parts, f"{owner} claims another part of {whole.owner}"
        self._claims[address] = Claim(
            owner=whole.owner, kind=whole.kind, num_bytes=whole.num_bytes - part.nbytes
        )
        self._parts[address] = Claim(owner=owner, kind=kind, num_bytes=part.nbytes)

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._claims

    def claims(self) -> tuple[Claim, ...]:
        """One for every owner and kind; by kind, then owner."""
        totals: dict[tuple[str, MemoryKind], int] = {}
        for claim in self._all():
            totals[claim.owner, claim.kind] = (
                totals.get((claim.owner, claim.kind), 0) + claim.num_bytes
            )
        order = list(MemoryKind)
        ordered = sorted(totals.items(), key=lambda item: (order.index(item[0][1]), item[0][0]))
        return tuple(
            Claim(owner=owner, kind=kind, num_bytes=num_bytes)
            for (owner, kind), num_bytes in ordered
            if num_bytes
        )

    def of_rank(self, rank: int) -> RankMemory:
        """The whole ledger, as others are told of it."""
        return RankMemory(rank=rank, device=str(self.device), claims=self.claims())

    def by_kind(self) -> dict[MemoryKind, int]:
        """Bytes of every kind, also of those that nobody has."""
        totals = dict.fromkeys(MemoryKind, 0)
        for claim in self._all():
            totals[claim.kind] += claim.num_bytes
        return totals

    @property
    def num_bytes(self) -> int:
        return sum(self.by_kind().values())

    def _all(self) -> Iterator[Claim]:
        yield from self._claims.values()
        yield from self._parts.values()

    def _device_of(self, kind: MemoryKind) -> torch.device:
        return torch.device("cpu") if kind is MemoryKind.HOST else self.device
