"""Greedy decoding by transformers on the same weights, one request at a time. Knows no service."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.peer import peer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """What transformers gave."""

    tokens_per_s: float
    """Tokens after the first ones, over the time after the first ones."""
    outputs: tuple[tuple[int, ...], ...]


class PeerDecoder:
    """transformers' DeepSeek-V4 with a checkpoint's target, in float32, and its own cache.

    A loop around the model's forward. With its `generate`, release 5.24.0 gives other tokens than its own uncached
    forward for this model, and is slower.
    """

    def __init__(self, checkpoint_dir: Path, *, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._model = peer_of(checkpoint_dir).model

    def run(self, prompts: Sequence[Sequence[int]], *, num_tokens: int) -> PeerRun:
        """Continue every prompt by `num_tokens`."""
        seconds, outputs = 0.0, []
        for prompt in prompts:
            output, later_s = self._decode(prompt, num_tokens)
            seconds += later_s
            outputs.append(output)
        return PeerRun(
            tokens_per_s=len(prompts) * (num_tokens - 1) / seconds, outputs=tuple(outputs)
        )

    @torch.inference_mode()
    def _decode(self, prompt: Sequence[int], num_tokens: int) -> tuple[tuple[int, ...], float]:
        result = self._model(input_ids=torch.tensor([list(prompt)]), use_cache=True)
        tokens = [int(result.logits[0, -1].argmax())]
        begin = time.perf_counter()
        while len(tokens) < num_tokens:
            newest = torch.tensor([tokens[-1:]])
            result = self._model(input_ids=newest, cache=result.cache, use_cache=True)
            tokens.append(int(result.logits[0, -1].argmax()))
        return tuple(tokens), time.perf_counter() - begin
