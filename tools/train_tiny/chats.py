"""Generated chats: many kinds of question, one fluent answer for each.

Knows questions and answers; never sees a token. Questions are split by their text: a held-out
question is never trained on in any wording that has the same text, whatever the seed.
"""

import random
from dataclasses import dataclass

from tools.train_tiny import facts, questions
from tools.train_tiny.corpus import is_held_out
from tools.train_tiny.tokenizer import Turn

DEMO_QUESTIONS = (
    "What is the capital of France?",
    "What is 7 plus 5?",
    "Write a Python function that adds two numbers.",
    "Which month comes after March?",
    "How do I reverse a list in Python?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A system prompt, often empty, and one or two turns."""

    system: str
    turns: list[Turn]


def train_chat(rng: random.Random) -> Chat:
    """A chat of training questions; the questions of the demo come up often."""
    system = rng.choice(facts.SYSTEMS) if rng.random() < 0.15 else ""
    num_turns = 2 if rng.random() < 0.2 else 1
    return Chat(system=system, turns=[_train_turn(rng) for _ in range(num_turns)])


def held_out_turn(rng: random.Random) -> Turn:
    """A question that no training chat contains."""
    while True:
        turn = rng.choice(questions.KINDS)(rng)
        if is_unseen(turn.question):
            return turn


def is_unseen(question: str) -> bool:
    return question not in DEMO_QUESTIONS and is_held_out(question.lower(), 8)


def demo_turns() -> list[Turn]:
    return [
        questions.capital_turn("France"),
        questions.sum_turn("plus", 7, 5),
        questions.function_turn("adds two numbers"),
        questions.next_turn("month", "after", "March"),
        questions.how_to_turn("reverse a list"),
    ]


def _train_turn(rng: random.Random) -> Turn:
    if rng.random() < 0.04:
        return rng.choice(demo_turns())
    while True:
        turn = rng.choice(questions.KINDS)(rng)
        if not is_unseen(turn.question):
            return turn
