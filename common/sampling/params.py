"""Sampling parameters of a batch as tensors, one entry a row. Knows rows and positions; knows no logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingRows:
    """How each row's token is drawn. All tensors are [N] on one device.

    The flags are known on the host, so that no decision waits for the device. They cover at least the rows held:
    after `select` a flag may be true although no selected row needs it, which costs time and changes no result.
    """

    temperature: Tensor
    """float32; exactly 0 for greedy rows."""
    top_k: Tensor
    """int64; 0 keeps all tokens."""
    top_p: Tensor
    """float32."""
    seed: Tensor
    """int64."""
    position: Tensor
    """int64; the position of the token being generated."""
    any_sampled: bool
    any_greedy: bool
    any_filtered: bool
    """Some sampled row has a top-k or top-p."""
    filter_width: int
    """No filtered row keeps more tokens than this; 0 where only the vocabulary bounds it."""

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        positions: Sequence[int] | Tensor,
        device: torch.device | str,
    ) -> SamplingRows:
        """Rows in the order of `params`, with one position each."""
        assert len(params) == len(positions), f"{len(params)=} {len(positions)=}"
        reals = torch.tensor(
            [[0.0 if p.is_greedy else p.temperature for p in params], [p.top_p for p in params]],
            dtype=torch.float32,
        ).to(device, non_blocking=True)
        integers = torch.tensor(
            [[p.top_k for p in params], [p.seed for p in params]], dtype=torch.int64
        ).to(device, non_blocking=True)
        filtered = [p for p in params if p.is_filtered]
        return cls(
            temperature=reals[0],
            top_p=reals[1],
            top_k=integers[0],
            seed=integers[1],
            position=torch.as_tensor(positions, dtype=torch.int64, device=device),
            any_sampled=any(not p.is_greedy for p in params),
            any_greedy=any(p.is_greedy for p in params),
            any_filtered=bool(filtered),
            filter_width=max((p.top_k for p in filtered), default=0)
            if all(p.top_k > 0 for p in filtered)
            else 0,
        )

    def __len__(self) -> int:
        return len(self.temperature)

    @property
    def all_greedy(self) -> bool:
        return not self.any_sampled

    @property
    def is_greedy(self) -> Tensor:
        """[N] bool."""
        return self.temperature == 0.0

    @property
    def is_filtered(self) -> Tensor:
        """[N] bool; true where a sampled row has a top-k or top-p."""
        return ((self.top_k > 0) | (self.top_p < 1.0)) & (self.temperature > 0.0)

    def select(self, index: Tensor | slice) -> SamplingRows:
        """The rows at `index`: int64 or bool tensor (bool waits for the device), or a slice."""
        return replace(
            self,
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            seed=self.seed[index],
            position=self.position[index],
        )

    def repeat(self, count: int) -> SamplingRows:
        """Every row `count` times, neighbours first; give the copies their positions with `at`."""
        return replace(
            self,
            temperature=self.temperature.repeat_interleave(count),
            top_k=self.top_k.repeat_interleave(count),
            top_p=self.top_p.repeat_interleave(count),
            seed=self.seed.repeat_interleave(count),
            position=self.position.repeat_interleave(count),
        )

    def at(self, positions: Tensor) -> SamplingRows:
        """The same rows at other positions [N] int64."""
        assert positions.shape == self.position.shape, f"{positions.shape=} {self.position.shape=}"
        return replace(self, position=positions)
