"""Prompts as token ids: the project's own, those at page borders, and others from a folder that a person names."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.prompts import Prompt, load_prompts
from common.tokenizer import ChatMessage, Tokenizer

BORDER_LENGTHS = (127, 128, 129, 255, 256, 257)
"""Around the first two page borders."""
HANDOFF_LENGTHS = (1, 127, 128, 129, 255, 256, 257, 511, 512, 513)
"""One row, and around the borders after one, two and four pages."""
EXTRA_PROMPTS = "DSPARK_EXTRA_PROMPTS"
"""The environment variable that names a folder of further prompts; they are not part of the project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt as the model reads it."""

    id: str
    domain: str
    is_unseen: bool
    token_ids: tuple[int, ...]


def own_questions(checkpoint_dir: Path) -> tuple[Question, ...]:
    """All of the project's prompts, and one for each border length cut from the longest code."""
    tokenizer = Tokenizer.from_folder(checkpoint_dir)
    questions = [_question(prompt, tokenizer) for prompt in load_prompts()]
    longest = max(questions, key=lambda question: len(question.token_ids))
    cut = [
        Question(
            id=f"{longest.id}-{length}",
            domain=longest.domain,
            is_unseen=False,
            token_ids=longest.token_ids[:length],
        )
        for length in BORDER_LENGTHS
    ]
    return (*questions, *cut)


def handoff_questions(checkpoint_dir: Path) -> tuple[Question, ...]:
    """One for each length whose state meets a border, cut from all of the project's prompts in a row."""
    tokenizer = Tokenizer.from_folder(checkpoint_dir)
    prompts = [_question(prompt, tokenizer).token_ids for prompt in load_prompts()]
    row = tuple(token for prompt in prompts for token in prompt)
    return tuple(
        Question(id=f"row-{length}", domain="chat", is_unseen=False, token_ids=row[:length])
        for length in HANDOFF_LENGTHS
    )


def extra_questions(checkpoint_dir: Path, *, num: int, max_tokens: int) -> tuple[Question, ...]:
    """`num` prompts from every file of the extra folder in turn; empty when none is named."""
    folder = os.environ.get(EXTRA_PROMPTS)
    if not folder:
        return ()
    tokenizer = Tokenizer.from_folder(checkpoint_dir)
    files = [
        path.read_text(encoding="utf-8").splitlines()
        for path in sorted(Path(folder).glob("*.jsonl"))
    ]
    turns = [json.loads(line)["turns"] for row in zip(*files, strict=False) for line in row]
    return tuple(
        Question(
            id=f"extra-{i}",
            domain="chat",
            is_unseen=False,
            token_ids=tuple(_chat(tokenizer, turn[0])[:max_tokens]),
        )
        for i, turn in enumerate(turns[:num])
    )


def _question(prompt: Prompt, tokenizer: Tokenizer) -> Question:
    content = prompt.content
    if isinstance(content, str):
        token_ids = tokenizer.encode(content, add_special_tokens=True)
    else:
        token_ids = tokenizer.encode_chat(
            [ChatMessage(role=m.role, content=m.content) for m in content]
        )
    return Question(
        id=prompt.id,
        domain=prompt.domain,
        is_unseen=prompt.is_unseen,
        token_ids=tuple(token_ids),
    )


def _chat(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_chat([ChatMessage(role="user", content=text)])
