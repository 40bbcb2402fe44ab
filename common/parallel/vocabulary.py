"""Logits whose vocabulary is spread over the ranks of a group: the largest without gathering, whole rows where they are needed.

Letters: N rows, V vocabulary, P this rank's part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.parallel.collectives import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """How the vocabulary is spread."""

    size: int
    part: slice
    """This rank's ids."""
    axis: Axis

    @property
    def is_whole(self) -> bool:
        return self.axis.size == 1

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Ids `[...]` of the largest logits, the lowest of equals, of parts `[..., P]`; two numbers a row travel."""
        if self.is_whole:
            return logits.argmax(-1)
        if logits.shape[-1]:
            best = logits.max(-1)
            values, ids = best.values.double(), (best.indices + self.part.start).double()
        else:
            values = logits.new_full(logits.shape[:-1], -torch.inf, dtype=torch.float64)
            ids = torch.full_like(values, float(self.size))
        # Ranks are in order of ids and argmax takes the first of equals, so the lowest id wins.
        gathered = torch.stack(self.axis.gather(torch.stack((values, ids))))
        winner = gathered[:, 0].argmax(0, keepdim=True)
        return gathered[:, 1].gather(0, winner)[0].long()

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Rows `[..., V]` of parts `[..., P]`. A rank's padding is cut off, so it never wins."""
        if self.is_whole:
            return logits
        widest = -(-self.size // self.axis.size)
        padded = F.pad(logits, (0, widest - logits.shape[-1]), value=-torch.inf)
        return torch.cat(self.axis.gather(padded), dim=-1)[..., : self.size]
