"""The shape of a mesh and what it demands of a model. Arithmetic only; needs no torch.

Ranks count tensor parallel places first: rank = dp_rank * tp + tp_rank. Requests belong to a data parallel group, whose
ranks hold the same cache; routed experts are spread over all ranks (`ep` = ranks) or, with `ep` 1, kept by every group,
their width being spread over its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Numbers of a mesh. Every rank belongs to one data parallel group and one place of its tensor parallel group."""

    dp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.ep) < 1:
            raise ConfigError(f"dp {self.dp}, tp {self.tp} and ep {self.ep} must be at least 1")
        if self.ep not in (1, self.num_ranks):
            raise ConfigError(
                f"ep is {self.ep}; give 1 or all {self.num_ranks} ranks of dp {self.dp} x tp {self.tp}"
            )

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        return f"DP{self.dp} x TP{self.tp} EP{self.ep}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisible:
    """Numbers of a model that a mesh cuts into equal parts. The vocabulary is not one: its last part may be shorter."""

    num_attention_heads: int
    o_groups: int
    n_routed_experts: int
    moe_intermediate_size: int

    def require_divided_by(self, mesh: MeshShape) -> None:
        """Raise ConfigError that names the numbers that do not go together."""
        cuts = (
            ("num_attention_heads", self.num_attention_heads, "tp", mesh.tp),
            ("o_groups", self.o_groups, "tp", mesh.tp),
            ("n_routed_experts", self.n_routed_experts, "ep", mesh.ep),
            ("moe_intermediate_size", self.moe_intermediate_size, "tp", mesh.tp),
        )
        for name, value, parts_name, num_parts in cuts:
            if value % num_parts:
                raise ConfigError(
                    f"{name} ({value}) is not divisible by {parts_name} ({num_parts})"
                )


def require_devices(mesh: MeshShape, *, num_nodes: int, num_devices: int | None) -> int:
    """Ranks of each node. Raises ConfigError when the nodes cannot hold the mesh.

    `num_devices` are a node's accelerators; None where ranks are processes of a CPU.
    """
    if num_nodes < 1 or mesh.num_ranks % num_nodes:
        raise ConfigError(
            f"the {mesh.num_ranks} ranks of {mesh} cannot be spread evenly over {num_nodes} nodes"
        )
    num_local = mesh.num_ranks // num_nodes
    if num_devices is not None and num_local > num_devices:
        raise ConfigError(
            f"{mesh} needs {num_local} devices on each of {num_nodes} nodes; this one has {num_devices}"
        )
    return num_local
