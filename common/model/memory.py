"""The tensors that a built model holds, found by looking, so that no module can forget to tell. Knows objects; no device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from common.model.dspark import DSparkModel
from common.model.matrices import Matrix
from common.model.rope import RopeTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensors:
    """What a model holds, by what it is."""

    target: tuple[torch.Tensor, ...]
    drafter: tuple[torch.Tensor, ...]
    """Without what it shares with the target."""
    tables: tuple[torch.Tensor, ...]
    """Rotations; worked out, not read."""


def held_tensors(model: DSparkModel) -> ModelTensors:
    """Every tensor, once."""
    seen: set[int] = set()
    target = list(_tensors(model.target, seen))
    drafter = list(_tensors(model.drafter, seen))
    return ModelTensors(
        target=tuple(t for t, is_table in target if not is_table),
        drafter=tuple(t for t, is_table in drafter if not is_table),
        tables=tuple(t for t, is_table in (*target, *drafter) if is_table),
    )


def _tensors(
    value: object, seen: set[int], in_table: bool = False
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Tensors under an object and whether each belongs to a table of rotations."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value, in_table
        return
    for child in _children(value):
        yield from _tensors(child, seen, in_table or isinstance(value, RopeTable))


def _children(value: object) -> Iterable[object]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Matrix):
        return value.tensors
    if isinstance(value, dict):
        return value.values()
    # Modules of a model keep what they have as attributes; everything else has no weights.
    is_module = type(value).__module__.startswith("common.model.")
    return vars(value).values() if is_module and hasattr(value, "__dict__") else ()
