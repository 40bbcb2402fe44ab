"""Held-out prompts, in two parts that share no question and no file: one to tune, one to report."""

import random
from pathlib import Path

from tokenizers import Tokenizer

from tools.train_tiny import chats, dataset, tokenizer
from tools.train_tiny.corpus import is_held_out

PARTS = ("calibrate", "evaluate")
CODE_PROMPT_TOKENS = (48, 160)


def chat_turns(part: str, num: int, seed: int) -> list[tokenizer.Turn]:
    """Distinct unseen questions of the part."""
    rng = random.Random(seed)
    turns: dict[str, tokenizer.Turn] = {}
    while len(turns) < num:
        turn = chats.held_out_turn(rng)
        if is_held_out("part " + turn.question, 2) == (part == "calibrate"):
            turns.setdefault(turn.question, turn)
    return list(turns.values())


def code_prompts(
    folder: Path, learned: Tokenizer, domain: str, part: str, num: int, seed: int
) -> list[list[int]]:
    """Excerpts of held-out files that begin at a line; every file gives about equally many."""
    rng = random.Random(f"{domain} {part} {seed}")
    documents = dataset.held_out_code(folder, learned).get(domain, [])
    chosen = [d for i, d in enumerate(documents) if (i % 2 == 0) == (part == "calibrate")]
    chosen = [d for d in chosen if len(d) > 320]
    prompts: list[list[int]] = []
    while chosen and len(prompts) < num:
        document = chosen[len(prompts) % len(chosen)]
        length = rng.randint(*CODE_PROMPT_TOKENS)
        start = rng.randrange(1, len(document) - length)
        while start > 1 and "\n" not in learned.decode([document[start - 1]]):
            start -= 1
        prompts.append([tokenizer.BOS, *document[start : start + length]])
    return prompts
