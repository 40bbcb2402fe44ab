"""Who has which long-lived memory of a worker's ranks, as facts. Knows kinds, owners and bytes; no tensors and no messages."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass


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
    HOST = "host"
    """The first rank's copy of other ranks' cache in host memory, which is in no device's budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One owner's memory of one kind."""

    owner: str
    kind: MemoryKind
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What one rank of a worker holds for as long as it lives."""

    rank: int
    device: str
    """As the rank's own node calls it, such as `cuda:3`."""
    claims: tuple[Claim, ...]

    def by_kind(self) -> dict[MemoryKind, int]:
        """Bytes of every kind, also of those that nobody has."""
        totals = dict.fromkeys(MemoryKind, 0)
        for claim in self.claims:
            totals[claim.kind] += claim.num_bytes
        return totals

    def to_json(self) -> str:
        claims = [(claim.owner, claim.kind.value, claim.num_bytes) for claim in self.claims]
        return json.dumps({"rank": self.rank, "device": self.device, "claims": claims})

    @classmethod
    def from_json(cls, text: str) -> RankMemory:
        value = json.loads(text)
        return cls(
            rank=value["rank"],
            device=value["device"],
            claims=tuple(
                Claim(owner=owner, kind=MemoryKind(kind), num_bytes=num_bytes)
                for owner, kind, num_bytes in value["claims"]
            ),
        )
