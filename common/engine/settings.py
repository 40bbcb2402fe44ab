"""What a worker's configuration says about its engine. Knows numbers; needs no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.errors import ConfigError
from common.parallel.mesh import MeshShape

MIN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of a mesh find one another."""

    address: str = ""
    """host:port that the first node listens on; a free port of this machine when empty."""
    num_nodes: int = 1
    node_rank: int = 0
    timeout_s: float = 60.0
    """Bound of every collective; a rank that does not take part for so long is lost."""
    start_timeout_s: float = 600.0
    """Bound of the start, in which ranks load their weights."""

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < self.num_nodes:
            raise ConfigError(
                f"node_rank is {self.node_rank}; give 0 to {self.num_nodes - 1} for {self.num_nodes} nodes"
            )
        if self.num_nodes > 1 and not self.address:
            raise ConfigError(
                f"{self.num_nodes} nodes need a rendezvous address, host:port of the first one"
            )
        if self.address and not self.address.rpartition(":")[2].isdigit():
            raise ConfigError(f"rendezvous address {self.address!r} is not host:port")
        if self.timeout_s < MIN_TIMEOUT_S:
            raise ConfigError(
                f"timeout_s is {self.timeout_s}; give at least {MIN_TIMEOUT_S}, since idle ranks hear of the first one "
                "only every few seconds"
            )
        if self.start_timeout_s <= 0:
            raise ConfigError(f"start_timeout_s is {self.start_timeout_s}; give a value above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What a worker's configuration says about its engine."""

    checkpoint_dir: Path
    dtype: str = "float32"
    device: str = "cpu"
    mesh: MeshShape = field(default_factory=MeshShape)
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    checks_replicas: bool = False
    """Compare the caches of every group's ranks after each step, which is slow; for finding faults."""
    num_slots: int = 16
    """Requests that may hold state at once, in all data parallel groups together."""
    num_pages: int | None = None
    """Pages of 128 positions, of all groups together; None: enough for every slot at the longest context."""
    quantization: str = "dequantize"
    """`dequantize` turns quantised weights into values on load; `native` keeps them as stored; `w8a8` does so too, and
    multiplies those of 8 bits with activations of 8 bits."""
    memory_fraction: float | None = None
    """Share of a device's memory for weights and caches, from which pages are sized; None: 0.9 of an accelerator's, and no
    limit on a CPU."""
    draft_length: int | None = None
    """Drafts per proposal; None: the checkpoint's dspark_block_size."""
    speculate: bool = True
    max_context_length: int | None = None
    """None: the checkpoint's max_position_embeddings."""
    max_step_rows: int = 512
    """Of each data parallel group."""
    max_uncommitted_rounds: int = 2
    slow_storage_mb_per_s: float = 500.0
    """Loading warns when storage is slower; 0 never warns."""

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"checkpoint_dir": str(self.checkpoint_dir)})

    @classmethod
    def from_json(cls, text: str) -> EngineSettings:
        value = json.loads(text)
        return cls(
            **value
            | {
                "checkpoint_dir": Path(value["checkpoint_dir"]),
                "mesh": MeshShape(**value["mesh"]),
                "rendezvous": Rendezvous(**value["rendezvous"]),
            }
        )
