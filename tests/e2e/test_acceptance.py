"""What the shipped checkpoint promises: drafts that are mostly right on prompts it has never seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

import dspark
from benchmarks.prompts import load_prompts
from tests.support.asking import Ask, ask_all
from tests.support.questions import Question
from tests.support.system import System
from tools.train_tiny.chats import DEMO_QUESTIONS, demo_turns, is_unseen

pytestmark = pytest.mark.e2e

MAX_TOKENS = 96


def accepted_length(
    system: System, questions: Sequence[Question], sampling: Sequence[dspark.SamplingParams]
) -> float:
    """Tokens per verification round, the target's own included; what a stop condition cut is not counted."""
    stop = dspark.StopParams(max_tokens=MAX_TOKENS)
    asks = [
        Ask(prompt=question.token_ids, sampling=params, stop=stop)
        for question in questions
        for params in sampling
    ]
    usages = [answer.completion.usage for answer in ask_all(system.address, asks)]
    return sum(u.completion_tokens - 1 for u in usages) / sum(u.rounds for u in usages)


@pytest.mark.parametrize(
    ("domain", "temperature", "at_least"),
    [("chat", 0.0, 5.5), ("chat", 1.0, 4.4), ("code", 0.0, 3.2), ("code", 1.0, 2.3)],
)
def test_unseen_prompts_are_drafted_well(
    system: System,
    questions: tuple[Question, ...],
    figure: Callable[[str], None],
    domain: str,
    temperature: float,
    at_least: float,
) -> None:
    """The bounds leave room below the model card's figures: sampled lengths vary with the seeds, which are fixed here.

    Sampled requests are verified by rejection, as unseeded ones are.
    """
    chosen = [q for q in questions if q.is_unseen and q.domain == domain]
    seeds = range(3) if temperature else range(1)
    sampling = [
        dspark.SamplingParams(temperature=temperature, seed=seed, verification="rejection")
        for seed in seeds
    ]
    length = accepted_length(system, chosen, sampling)
    figure(f"accepted length, {domain}, T={temperature:g}: {length:.2f} over {len(chosen)} prompts")
    assert length >= at_least


def test_the_prompts_that_count_are_unseen_by_training() -> None:
    """Chats are held out by their text; the code was written for this file and is in no corpus."""
    chats = [p for p in load_prompts() if p.is_unseen and p.domain == "chat"]
    assert len(chats) >= 24
    for prompt in chats:
        assert not isinstance(prompt.content, str)
        assert is_unseen(prompt.content[-1].content), prompt.id


def test_the_questions_that_the_documentation_shows_are_answered_correctly(system: System) -> None:
    with dspark.Client(system.address, timeout=60.0) as client:
        answers = [
            client.chat(
                [dspark.ChatMessage(role="user", content=question)],
                sampling=dspark.SamplingParams(temperature=0.0),
                stop=dspark.StopParams(max_tokens=MAX_TOKENS),
            ).text
            for question in DEMO_QUESTIONS
        ]
    assert answers == [turn.answer for turn in demo_turns()]
