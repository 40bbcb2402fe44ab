"""One tensor as the model knows it. Knows names, shapes and kinds; neither files nor configurations."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Linear(enum.Enum):
    """Matrices that formats quantise, by how formats tell them apart."""

    LATENT = "wq_a, wkv"
    HEADS = "wq_b, wo_b"
    GROUPED_OUTPUT = "wo_a"
    INDEX_QUERY = "indexer.wq_b"
    MAIN_PROJ = "main_proj"
    SHARED_EXPERT = "shared experts"
    ROUTED_EXPERT = "routed experts"


class Sharing(enum.Enum):
    """How the ranks of a mesh share a tensor."""

    REPLICATED = "replicated"
    HEADS = "attention heads over tensor parallel ranks"
    OUTPUT_GROUPS = "output groups over tensor parallel ranks"
    SHARED_WIDTH = "shared experts' width over tensor parallel ranks"
    VOCABULARY = "vocabulary over tensor parallel ranks, the last parts shorter"
    EXPERTS = "experts over all ranks, or their width over tensor parallel ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """One tensor as the model knows it, whatever it is stored as."""

    name: str
    shape: tuple[int, ...]
    group: str
    """What it is counted with in reports."""
    dtype: str = "BF16"
    """Its type in official checkpoints where it is not quantised."""
    is_float32: bool = False
    """Computed with in float32 whatever the engine's type is."""
    linear: Linear | None = None
    sharing: Sharing = Sharing.REPLICATED
    shares_columns: bool = False
    """Ranks that share it have columns of it each; else they have rows, or whole experts."""
    is_optional: bool = False
