"""The guard of the whole system: however a greedy request is served, its tokens are those of plain decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.deployments import deployed
from tests.support.asking import Answer, Ask, ask_all, exactly
from tests.support.margins import NEAR_TIE, judged
from tests.support.peer import Peer, peer_of
from tests.support.questions import (
    EXTRA_PROMPTS,
    Question,
    extra_questions,
    handoff_questions,
)
from tests.support.solo import Job, Output, Solo
from tests.support.system import EventLoop, System, SystemOptions
from tests.support.transfer_engines import engine_params, transfer_config

pytestmark = pytest.mark.e2e

NUM_TOKENS = 96
NUM_HANDOFF_TOKENS = 12
"""Enough for two rounds with drafts."""
NUM_EXTRA = 12


def asks(questions: Sequence[Question], num_tokens: int = NUM_TOKENS) -> list[Ask]:
    return [Ask(prompt=q.token_ids, stop=exactly(num_tokens)) for q in questions]


def expected(
    plain: Solo, questions: Sequence[Question], num_tokens: int = NUM_TOKENS
) -> list[Output]:
    return plain.together([Job(prompt=q.token_ids, num_tokens=num_tokens) for q in questions])


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


@pytest.fixture(scope="module")
def greedy(plain: Solo, questions: tuple[Question, ...]) -> list[Output]:
    """What every question must be answered with."""
    return expected(plain, questions)


@pytest.fixture(scope="module")
def borders(shipped_checkpoint: Path) -> tuple[Question, ...]:
    """Prompts whose state ends at and around the borders of pages."""
    return handoff_questions(shipped_checkpoint)


@pytest.fixture(scope="module")
def greedy_at_borders(plain: Solo, borders: tuple[Question, ...]) -> list[Output]:
    return expected(plain, borders, NUM_HANDOFF_TOKENS)


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


@pytest.mark.parametrize("engine", engine_params("grpc", "nixl", "nixl-tcp", "mooncake"))
def test_with_every_transfer_engine_it_equals_plain_decoding_at_all_borders(
    servers: EventLoop,
    shipped_checkpoint: Path,
    engine: str,
    borders: tuple[Question, ...],
    greedy_at_borders: list[Output],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transfer = transfer_config(engine, monkeypatch)
    options = SystemOptions(checkpoint_dir=shipped_checkpoint, transfer=transfer)
    with System(servers, options).running() as system:
        answers = ask_all(system.address, asks(borders, NUM_HANDOFF_TOKENS))
        assert not differences(borders, answers, greedy_at_borders)
        engines = {answer.completion.route.transfer_engine for answer in answers}
        assert engines == {transfer.engine}
        system.wait_at_rest()


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
    borders: tuple[Question, ...],
    greedy_at_borders: list[Output],
    figure: Callable[[str], None],
) -> None:
    answers = judged(peer, questions, greedy)
    for answer, output in zip(answers, greedy, strict=True):
        assert output.token_ids == answer.choices, answer.question.id
    at_borders = judged(peer, borders, greedy_at_borders)
    for answer, output in zip(at_borders, greedy_at_borders, strict=True):
        assert output.token_ids == answer.choices, answer.question.id
    margin, where = min(answer.smallest for answer in (*answers, *at_borders))
    num_tokens = sum(len(output.token_ids) for output in greedy)
    figure(
        f"guard: {len(questions)} prompts, {num_tokens} tokens; smallest top-2 margin {margin:.2e} ({where})"
    )
    # The prompts are chosen so that no test hangs on the last bits of a logit, which differ between machines.
    assert margin > NEAR_TIE, f"change this prompt: {where}"


def test_prompts_from_elsewhere_hold_too(
    system: System,
    plain: Solo,
    peer: Peer,
    shipped_checkpoint: Path,
    figure: Callable[[str], None],
) -> None:
    """Nobody chose these prompts, so each is compared up to its first near tie."""
    limit = plain.loaded.engine.config.max_context_length - NUM_TOKENS
    questions = extra_questions(shipped_checkpoint, num=NUM_EXTRA, max_tokens=limit)
    if not questions:
        pytest.skip(f"{EXTRA_PROMPTS} names no folder with prompts")
    outputs = expected(plain, questions)
    answers = ask_all(system.address, asks(questions))
    num_compared = 0
    for answer, output, other in zip(
        answers, outputs, judged(peer, questions, outputs), strict=True
    ):
        clear = slice(0, other.num_clear)
        assert answer.token_ids[clear] == output.token_ids[clear], other.question.id
        assert output.token_ids[clear] == other.choices[clear], other.question.id
        num_compared += other.num_clear
    figure(f"guard: {len(questions)} extra prompts, {num_compared} tokens")
    assert num_compared > 0.9 * NUM_TOKENS * len(questions)


@pytest.mark.parametrize("engine", ["auto", *engine_params("mooncake")])
async def test_three_processes_equal_plain_decoding(
    shipped_checkpoint: Path, questions: tuple[Question, ...], greedy: list[Output], engine: str
) -> None:
    few = slice(0, None, 8)
    model = str(shipped_checkpoint)
    async with deployed(model, speculate=True, transfer_engine=engine) as address:
        answers = await asyncio.to_thread(ask_all, address, asks(questions[few]))
    if engine != "auto":
        assert {answer.completion.route.transfer_engine for answer in answers} == {engine}
    assert not differences(questions[few], answers, greedy[few])
