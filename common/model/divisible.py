"""What a mesh has to divide in a model. Knows the configuration; needs no torch."""

from __future__ import annotations

from common.model.config import ModelConfig
from common.parallel.mesh import Divisible


def divisible(config: ModelConfig) -> Divisible:
    """The numbers that a mesh cuts into equal parts."""
    return Divisible(
        num_attention_heads=config.num_attention_heads,
        o_groups=config.o_groups,
        n_routed_experts=config.n_routed_experts,
        moe_intermediate_size=config.moe_intermediate_size,
    )
