"""Vocabularies as the ranks of a tensor parallel group spread them."""

from __future__ import annotations

from common.parallel.collectives import Axis
from common.parallel.mesh import MeshShape
from common.parallel.shard import Shard
from common.parallel.vocabulary import Vocabulary


def vocabulary_of(size: int, axis: Axis) -> Vocabulary:
    """What the rank of `axis` has of it."""
    shard = Shard(mesh=MeshShape(tp=axis.size), rank=axis.index)
    return Vocabulary(size=size, part=shard.vocabulary_part(size), axis=axis)
