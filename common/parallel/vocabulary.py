"""Logits whose vocabulary is spread over the ranks of a group: the largest one, the largest few, or whole rows.

Letters: N rows, V vocabulary, P this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        return torch.cat(self.axis.gather(self._padded(logits)), dim=-1)[..., : self.size]

    def top(self, logits: torch.Tensor, num_top: Sequence[int]) -> torch.Tensor:
        """Rows `[N, V]` of parts `[N, P]`, right for the `num_top[i]` largest of row i, the lowest ids of equals.

        Logits below those may be -inf instead; a count of 0 asks for the whole row. Value and id of as many as are
        asked for travel from each rank, eight bytes, or its part of the row where that is less.
        """
        if self.is_whole:
            return logits
        is_small = [count > 0 and 2 * count < self._widest for count in num_top]
        small = [i for i, each in enumerate(is_small) if each]
        if not small:
            return self.whole(logits)
        best = self._largest(logits[small], [num_top[i] for i in small])
        if len(small) == len(num_top):
            return best
        room = logits.new_empty(len(num_top), self.size)
        room[small] = best
        others = [i for i, each in enumerate(is_small) if not each]
        room[others] = self.whole(logits[others])
        return room

    def _largest(self, logits: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """`[n, V]`: each rank's `counts[i]` largest of row i, and -inf."""
        # Stable, since among equals the lowest ids pass filters; padding comes behind everything.
        best = self._padded(logits).sort(dim=-1, descending=True, stable=True)
        lengths = torch.tensor(counts)
        rows = torch.arange(len(counts)).repeat_interleave(lengths)
        columns = torch.arange(len(rows)) - (lengths.cumsum(0) - lengths)[rows]
        rows, columns = rows.to(logits.device), columns.to(logits.device)
        values = best.values[rows, columns]
        ids = best.indices[rows, columns] + self.part.start
        room = logits.new_full((len(counts), self._widest * self.axis.size), -torch.inf)
        # One message: the bits of a value beside its id.
        for theirs in self.axis.gather(torch.stack((values.view(torch.int32), ids.int()))):
            room[rows, theirs[1].long()] = theirs[0].view(torch.float32)
        return room[:, : self.size]

    @property
    def _widest(self) -> int:
        """The length of the longest part; all but the last ones have it."""
        return -(-self.size // self.axis.size)

    def _padded(self, logits: torch.Tensor) -> torch.Tensor:
        return F.pad(logits, (0, self._widest - logits.shape[-1]), value=-torch.inf)
