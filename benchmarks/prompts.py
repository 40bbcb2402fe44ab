"""The project's own prompts: questions and code that were written for it. Knows texts; never sees a token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dspark import ChatMessage

PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: a conversation or a text to be continued."""

    id: str
    domain: Literal["chat", "code"]
    is_unseen: bool
    """True for what the shipped checkpoint was not trained on: only these count for accepted lengths."""
    content: tuple[ChatMessage, ...] | str


def load_prompts(path: Path = PROMPTS) -> tuple[Prompt, ...]:
    """All prompts in the order of their file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(_prompt(json.loads(line)) for line in lines)


def _prompt(fields: dict[str, object]) -> Prompt:
    messages, text = fields.get("messages"), fields.get("text")
    assert isinstance(messages, list) or isinstance(text, str), f"{fields['id']} has no content"
    return Prompt(
        id=str(fields["id"]),
        domain="chat" if fields["domain"] == "chat" else "code",
        is_unseen=bool(fields["unseen"]),
        content=tuple(ChatMessage(**message) for message in messages)
        if isinstance(messages, list)
        else str(text),
    )
