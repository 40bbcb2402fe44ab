"""The nouns of two workers' first meeting. Knows what they tell each other; no message and no memory."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ContractMismatch
from common.transfer.handoff import CacheContract
from common.transfer.plan import RegionMemory

PROBE_BYTES = 64
"""Written when two engines meet, to see whether bytes arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescriptor:
    """What a peer's engine must know to write into our memory."""

    name: str
    endpoint: bytes = b""
    """Opaque to all but the engine: an address or an agent's metadata."""
    region_addresses: tuple[int, ...] = ()
    """Where the regions begin in the owner's address space, in layout order."""
    probe_address: int = 0
    """`PROBE_BYTES` bytes that nobody reads."""
    device: str = "cpu"

    def require_regions(self, num_regions: int, *, peer: str) -> None:
        """Raise ContractMismatch unless it says where that many regions begin."""
        if len(self.region_addresses) != num_regions:
            raise ContractMismatch(
                f"{peer} says where {len(self.region_addresses)} regions begin; the contract has {num_regions}",
                metadata={"field": "region_addresses"},
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """A sender says what it is."""

    generation: str
    address: str
    """Where it serves, host:port; names it in logs and figures."""
    contract: CacheContract
    transfer_engines: tuple[str, ...]
    """What it can use, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquaintance:
    """A receiver says what it is."""

    generation: str
    engine: EngineDescriptor
    """The chosen one."""
    memory: tuple[RegionMemory, ...]
    """In layout order."""
    transfer_engines: tuple[str, ...]
    """What it can use, best first."""
    drafter_difference: str = ""
    """Why the drafter's rows must stay behind; empty when they travel."""
