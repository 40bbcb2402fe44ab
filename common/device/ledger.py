"""Who owns which memory of a device. Knows kinds, owners and bytes; allocates nothing.

Every long-lived buffer is entered once, under one owner: what is in the ledger is what a worker holds for as long as it
lives, and what is not is the passing need of a step.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import torch


class MemoryKind(enum.Enum):
    """What memory is used for; the values are labels of metrics."""

    WEIGHTS = "weights"
    PAGES = "pages"
    """Compressed rows and index keys, which requests hold by page."""
    RINGS = "rings"
    """Window rows and open compression groups, by slot."""
    DRAFTER = "drafter"
    """The drafter's rows, by slot."""
    WORKSPACE = "workspace"
    """Tables and scratch memory that steps use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One owner's memory of one kind."""

    owner: str
    kind: MemoryKind
    num_bytes: int


class Ledger:
    """The long-lived memory of one device in one process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._owners: dict[int, tuple[str, MemoryKind, int]] = {}
        """By address of the memory."""

    def claim(self, owner: str, kind: MemoryKind, tensors: Iterable[torch.Tensor]) -> None:
        """Enter memory of `tensors`; views of one buffer count once. A second owner of a buffer is our mistake."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                continue
            assert tensor.device == self.device, f"{owner} claims memory of {tensor.device}"
            other, other_kind, _ = self._owners.setdefault(
                storage.data_ptr(), (owner, kind, storage.nbytes())
            )
            assert (other, other_kind) == (owner, kind), (
                f"{storage.nbytes()} bytes of {kind.value} are claimed by {owner} and by {other} as {other_kind.value}"
            )

    def release(self, owner: str) -> None:
        """Strike out what an owner has; it frees the memory itself."""
        self._owners = {
            address: claim for address, claim in self._owners.items() if claim[0] != owner
        }

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._owners

    def claims(self) -> tuple[Claim, ...]:
        """By kind, then owner."""
        totals: dict[tuple[str, MemoryKind], int] = {}
        for owner, kind, num_bytes in self._owners.values():
            totals[owner, kind] = totals.get((owner, kind), 0) + num_bytes
        order = list(MemoryKind)
        ordered = sorted(totals.items(), key=lambda item: (order.index(item[0][1]), item[0][0]))
        return tuple(
            Claim(owner=owner, kind=kind, num_bytes=num_bytes)
            for (owner, kind), num_bytes in ordered
        )

    def by_kind(self) -> dict[MemoryKind, int]:
        """Bytes of every kind, also of those that nobody has."""
        totals = dict.fromkeys(MemoryKind, 0)
        for _, kind, num_bytes in self._owners.values():
            totals[kind] += num_bytes
        return totals

    @property
    def num_bytes(self) -> int:
        return sum(self.by_kind().values())

    def details(self) -> dict[str, str]:
        """For a worker's description of itself."""
        return {
            "device": str(self.device),
            **{f"memory.{kind.value}_bytes": str(size) for kind, size in self.by_kind().items()},
        }
