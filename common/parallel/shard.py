"""One rank's parts of what a mesh spreads. Knows sizes; no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.parallel.mesh import MeshShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A rank's place in a mesh."""

    mesh: MeshShape = field(default_factory=MeshShape)
    rank: int = 0

    @property
    def dp_rank(self) -> int:
        return self.rank // self.mesh.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.mesh.tp

    @property
    def is_leader(self) -> bool:
        """The first of its data parallel group, which speaks for it."""
        return self.tp_rank == 0

    def tp_part(self, size: int) -> slice:
        """This rank's equal part of something that its group spreads."""
        assert size % self.mesh.tp == 0, f"{size=} {self.mesh}"
        part = size // self.mesh.tp
        return slice(self.tp_rank * part, (self.tp_rank + 1) * part)

    def vocabulary_part(self, size: int) -> slice:
        """This rank's rows of the vocabulary; the last parts may be shorter than the others, or empty."""
        part = -(-size // self.mesh.tp)
        return slice(min(self.tp_rank * part, size), min((self.tp_rank + 1) * part, size))

    def experts(self, num_experts: int) -> range:
        """Routed experts whose weights this rank has, whole or in part."""
        if self.mesh.ep == 1:
            return range(num_experts)
        part = num_experts // self.mesh.ep
        return range(self.rank * part, (self.rank + 1) * part)

    def expert_width(self, width: int) -> slice:
        """Columns of each expert that this rank has."""
        return self.tp_part(width) if self.mesh.ep == 1 else slice(0, width)

    def __str__(self) -> str:
        mesh = self.mesh
        return f"rank {self.rank} of {mesh.num_ranks} (dp {self.dp_rank}, tp {self.tp_rank})"


WHOLE = Shard()
"""The only rank of a mesh of one."""
