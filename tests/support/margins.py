"""How sure another implementation is of every token: its choice, and how far behind the second one came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.support.peer import Peer
from tests.support.questions import Question
from tests.support.solo import Output

NEAR_TIE = 3e-5
"""Logits of two runs differ by up to 1e-5 when sums are taken in another order; below this margin either token is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """An output as the peer sees it."""

    question: Question
    choices: tuple[int, ...]
    """The peer's greedy token after everything that precedes it."""
    margins: tuple[float, ...]
    """Of the peer's first choice over its second."""

    @property
    def smallest(self) -> tuple[float, str]:
        margin = min(self.margins)
        return margin, f"{self.question.id}, token {self.margins.index(margin)}"

    @property
    def num_clear(self) -> int:
        """Tokens before the first near tie."""
        return next((i for i, m in enumerate(self.margins) if m < NEAR_TIE), len(self.margins))


def judged(peer: Peer, questions: Sequence[Question], outputs: Sequence[Output]) -> list[Judged]:
    """One forward over each prompt and output: if every token is the peer's choice, the output is the peer's own."""
    return [_judged(peer, q, output) for q, output in zip(questions, outputs, strict=True)]


def _judged(peer: Peer, question: Question, output: Output) -> Judged:
    tokens = [*question.token_ids, *output.token_ids]
    best: torch.return_types.topk = (
        peer.run(tokens[:-1]).logits[len(question.token_ids) - 1 :].topk(2)
    )
    margins = best.values[:, 0] - best.values[:, 1]
    return Judged(
        question=question,
        choices=tuple(best.indices[:, 0].tolist()),
        margins=tuple(margins.tolist()),
    )
