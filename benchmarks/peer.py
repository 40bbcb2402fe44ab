"""Greedy decoding by transformers on the same weights, one request at a time. Knows no service."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.peer import peer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """What transformers gave."""

    num_threads: int
    tokens_per_s: float
    """Tokens after the first ones, over the time after the first ones."""
    outputs: tuple[tuple[int, ...], ...]


class PeerGenerator:
    """transformers' DeepSeek-V4 with a checkpoint's target, in float32."""

    def __init__(self, checkpoint_dir: Path) -> None:
        self._model = peer_of(checkpoint_dir).model

    def run(
        self, prompts: Sequence[Sequence[int]], *, num_tokens: int, num_threads: int
    ) -> PeerRun:
        """Continue every prompt by `num_tokens` with `generate` and its own cache."""
        torch.set_num_threads(num_threads)
        seconds, outputs = 0.0, []
        for prompt in prompts:
            clock = _TokenClock()
            output: Any = self._model.generate(
                torch.tensor([list(prompt)]),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
                streamer=clock,
            )
            seconds += clock.times[-1] - clock.times[0]
            outputs.append(tuple(output[0, len(prompt) :].tolist()))
        return PeerRun(
            num_threads=num_threads,
            tokens_per_s=len(prompts) * (num_tokens - 1) / seconds,
            outputs=tuple(outputs),
        )


class _TokenClock:
    """What `generate` calls a streamer: it is given the prompt, then every token."""

    def __init__(self) -> None:
        self._has_prompt = False
        self.times: list[float] = []

    def put(self, _value: torch.Tensor) -> None:
        if self._has_prompt:
            self.times.append(time.perf_counter())
        self._has_prompt = True

    def end(self) -> None:
        pass
