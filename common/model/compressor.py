"""Pools runs of tokens into compressed rows (ratio 4 with overlap, ratio 128 without), in float32.

Every token's contribution is kept in a tail ring under its position, so that a rejected draft leaves nothing behind:
a group that closes again is computed again from the rows that count.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.model.config import ModelConfig
from common.model.joined import joined
from common.model.kernels import Kernels
from common.model.plan import StepPlan
from common.model.rope import RopeTable
from common.model.weights import Weights


class Compressor:
    """One compressor; tensors `wkv`, `wgate`, `ape`, `norm`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        ratio: int,
        width: int,
        rope: RopeTable,
        kernels: Kernels,
    ) -> None:
        self._ratio = ratio
        self._width = width
        self._eps = config.rms_norm_eps
        self._rope = rope
        self._kernels = kernels
        coff = 2 if ratio == 4 else 1
        self._row_width = coff * width
        wkv = weights.floats("wkv.weight", coff * width, config.hidden_size)
        wgate = weights.floats("wgate.weight", coff * width, config.hidden_size)
        self.wkv_gate = joined((wkv, wgate))
        ape = weights.floats("ape", ratio, coff * width)
        self.ape = joined((ape.new_zeros(ape.shape), ape), dim=1)
        self.norm = weights.floats("norm.weight", width)

    def __call__(
        self,
        x: torch.Tensor,
        plan: StepPlan,
        *,
        tail: torch.Tensor,
        tail_region: str,
        pages: torch.Tensor,
    ) -> None:
        """Write the tail rows of this step and every compressed row that closes in it.

        `x [N, D]` is the sublayer's input, `tail` and `pages` are the layer's flattened rows in the cache.
        """
        rows = F.linear(x.float(), self.wkv_gate).add_(self.ape[plan.ape_rows[self._ratio]])
        closing = plan.compressions.get(self._ratio)
        if closing is not None:
            inputs = torch.cat((tail[closing.past_index], rows))[closing.input_index]
            pooled = self._pool(inputs, closing.absent)
            entry = self._kernels.rms_norm(pooled, self.norm, self._eps).unsqueeze(1)
            entry = self._kernels.rotate(entry, self._rope.at(closing.positions)).squeeze(1)
            pages[closing.target] = entry.to(pages.dtype)
        plan.ring_writes[tail_region].apply(tail, rows)

    def _pool(self, inputs: torch.Tensor, absent: torch.Tensor | None) -> torch.Tensor:
        """`inputs [E, coff * ratio, 2 * coff * width]` to `[E, width]`."""
        kv, gate = inputs.chunk(2, dim=-1)
        if self._row_width != self._width:
            kv, gate = self._overlap(kv), self._overlap(gate)
        if absent is not None:
            gate = gate.masked_fill(absent.unsqueeze(-1), -torch.inf)
        return (gate.softmax(1) * kv).sum(1)

    def _overlap(self, rows: torch.Tensor) -> torch.Tensor:
        """The previous group gives its first half, the current one its second."""
        previous = rows[:, : self._ratio, : self._width]
        current = rows[:, self._ratio :, self._width :]
        return torch.cat((previous, current), dim=1)
