"""The guard of the whole system: however a greedy request is served, its tokens are those of plain decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from services.cli.deployment import Deployment
from services.cli.settings import AllSettings
from services.cli.timeline import Timeline
from tests.support.asking import Answer, Ask, ask_all, exactly
from tests.support.peer import Peer, peer_of
from tests.support.questions import EXTRA_PROMPTS, Question, extra_questions
from tests.support.solo import Job, Output, Solo
from tests.support.system import System

pytestmark = pytest.mark.e2e

NUM_TOKENS = 96
NUM_EXTRA = 24


def asks(questions: Sequence[Question]) -> list[Ask]:
    return [Ask(prompt=q.token_ids, stop=exactly(NUM_TOKENS)) for q in questions]


def expected(plain: Solo, questions: Sequence[Question]) -> list[Output]:
    return plain.together([Job(prompt=q.token_ids, num_tokens=NUM_TOKENS) for q in questions])


def differences(
    questions: Sequence[Question], answers: Sequence[Answer], outputs: Sequence[Output]
) -> dict[str, int]:
    """First position after the prompt at which an answer differs, by question."""
    found = {}
    for question, answer, output in zip(questions, answers, outputs, strict=True):
        pairs = zip(answer.token_ids, output.token_ids, strict=True)
        first = next((i for i, (got, wanted) in enumerate(pairs) if got != wanted), None)
        if first is not None:
            found[question.id] = first
    return found


def smallest_margin(
    peer: Peer, questions: Sequence[Question], outputs: Sequence[Output]
) -> tuple[float, str]:
    """Checks every token against the peer's choice; returns how close the second choice ever came, and where.

    One forward over prompt and output: if each token is the peer's argmax after all that precedes it, the output is the
    peer's own greedy continuation.
    """
    smallest = (float("inf"), "")
    for question, output in zip(questions, outputs, strict=True):
        tokens = [*question.token_ids, *output.token_ids]
        logits = peer.run(tokens[:-1]).logits[len(question.token_ids) - 1 :]
        best = logits.topk(2)
        margins = best.values[:, 0] - best.values[:, 1]
        wrong = (best.indices[:, 0] != torch.tensor(output.token_ids)).nonzero().flatten().tolist()
        assert not wrong, (
            f"{question.id}: token {wrong[0]} differs, where the peer's margin is {margins[wrong[0]]:.2e}"
        )
        where = f"{question.id}, token {int(margins.argmin())}"
        smallest = min(smallest, (float(margins.min()), where))
    return smallest


@pytest.fixture(scope="module")
def greedy(plain: Solo, questions: tuple[Question, ...]) -> list[Output]:
    """What every question must be answered with."""
    return expected(plain, questions)


@pytest.fixture(scope="module")
def peer(shipped_checkpoint: Path) -> Peer:
    return peer_of(shipped_checkpoint)


def test_the_prompts_are_many_and_meet_the_page_borders(questions: tuple[Question, ...]) -> None:
    lengths = {len(question.token_ids) for question in questions}
    assert len(questions) >= 24
    assert {127, 128, 129, 255, 256, 257} <= lengths
    assert min(lengths) < 16
    assert max(lengths) > 300


def test_speculation_behind_a_hand_off_equals_plain_decoding_in_one_process(
    system: System, questions: tuple[Question, ...], greedy: list[Output]
) -> None:
    answers = ask_all(system.address, asks(questions))
    assert not differences(questions, answers, greedy)
    for answer in answers:
        assert answer.completion.finish_reason == "length"
        assert answer.completion.route.prefill_worker == system.prefill_address
        assert answer.completion.route.transfer_engine
        assert not answer.completion.route.drafter_fallback


def test_one_worker_for_both_roles_equals_plain_decoding(
    one_worker: System, questions: tuple[Question, ...], greedy: list[Output]
) -> None:
    answers = ask_all(one_worker.address, asks(questions))
    assert not differences(questions, answers, greedy)
    assert {answer.completion.route.prefill_worker for answer in answers} == {""}


def test_plain_decoding_equals_an_independent_implementation(
    peer: Peer,
    questions: tuple[Question, ...],
    greedy: list[Output],
    figure: Callable[[str], None],
) -> None:
    margin, where = smallest_margin(peer, questions, greedy)
    # Other machines sum in another order; a prompt that hangs on the last bits of a logit would test that instead.
    assert margin > 2e-5, f"choose another prompt: {where} has a margin of {margin:.1e}"
    num_tokens = sum(len(output.token_ids) for output in greedy)
    figure(
        f"guard: {len(questions)} prompts, {num_tokens} tokens; smallest top-2 margin {margin:.2e} ({where})"
    )


def test_prompts_from_beside_the_checkout_hold_too(
    system: System,
    plain: Solo,
    peer: Peer,
    shipped_checkpoint: Path,
    figure: Callable[[str], None],
) -> None:
    limit = plain.loaded.engine.config.max_context_length - NUM_TOKENS
    questions = extra_questions(shipped_checkpoint, num=NUM_EXTRA, max_tokens=limit)
    if not questions:
        pytest.skip(f"no folder ../shared/data/prompts beside the checkout and no {EXTRA_PROMPTS}")
    outputs = expected(plain, questions)
    assert not differences(questions, ask_all(system.address, asks(questions)), outputs)
    margin, where = smallest_margin(peer, questions, outputs)
    figure(f"guard: {len(questions)} extra prompts; smallest top-2 margin {margin:.2e} ({where})")


async def test_three_processes_equal_plain_decoding(
    shipped_checkpoint: Path, questions: tuple[Question, ...], greedy: list[Output]
) -> None:
    settings = AllSettings.model_validate(
        {"model": str(shipped_checkpoint), "router": {"port": 0}, "log": {"level": "warning"}}
    )
    deployment = await Deployment.start(settings, Timeline())
    try:
        address = await deployment.ready(60.0)
        few = slice(0, None, 8)
        answers = await asyncio.to_thread(ask_all, address, asks(questions[few]))
        assert not differences(questions[few], answers, greedy[few])
    finally:
        await deployment.stop(10.0)
