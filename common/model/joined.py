"""Weights side by side in one tensor. Knows shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def joined(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """`torch.cat` for weights. On the meta device, where models are rehearsed, that one imports torch's whole compiler."""
    first = parts[0]
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    room = first.new_empty(shape)
    begin = 0
    for part in parts:
        room.narrow(dim, begin, part.shape[dim]).copy_(part)
        begin += part.shape[dim]
    return room
