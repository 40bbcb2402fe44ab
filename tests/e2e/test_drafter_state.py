"""The drafter's state travels: behind a hand-off drafts are accepted as if prefill and decode were one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import dspark
from tests.support.asking import Answer, Ask, ask_all, exactly
from tests.support.other_drafters import without_drafter
from tests.support.questions import Question
from tests.support.solo import Job, Output, Solo
from tests.support.system import EventLoop, System, SystemOptions

pytestmark = pytest.mark.e2e

NUM_TOKENS = 48
FIRST_ROUNDS = slice(1, 4)
"""Rounds 1 to 3 after the hand-off; round 0 is the first token, which prefill samples."""


@pytest.fixture(scope="module")
def in_process(speculating: Solo, questions: tuple[Question, ...]) -> list[Output]:
    return speculating.together([Job(prompt=q.token_ids, num_tokens=NUM_TOKENS) for q in questions])


def ask(system: System, questions: Sequence[Question]) -> list[Answer]:
    return ask_all(
        system.address, [Ask(prompt=q.token_ids, stop=exactly(NUM_TOKENS)) for q in questions]
    )


def mean_accepted_length(rounds: Sequence[tuple[int, ...]]) -> float:
    return sum(sum(sizes[1:]) for sizes in rounds) / sum(len(sizes) - 1 for sizes in rounds)


def first_rounds(rounds: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [sizes[FIRST_ROUNDS] for sizes in rounds]


def test_every_round_behind_a_hand_off_accepts_what_it_would_in_one_process(
    system: System,
    questions: tuple[Question, ...],
    in_process: list[Output],
    figure: Callable[[str], None],
) -> None:
    answers = ask(system, questions)
    handed_off = [answer.rounds for answer in answers]
    solo = [output.rounds for output in in_process]
    lengths = mean_accepted_length(handed_off), mean_accepted_length(solo)
    figure(f"accepted length behind a hand-off {lengths[0]:.3f}, in process {lengths[1]:.3f}")
    assert lengths[0] == pytest.approx(lengths[1], rel=0.01)
    # The first rounds are where lost state would show: later ones have drafter rows that decode wrote itself.
    first = [sum(map(sum, first_rounds(rounds))) for rounds in (handed_off, solo)]
    assert first[0] == pytest.approx(first[1], rel=0.01)
    different = [
        question.id
        for question, mine, theirs in zip(questions, handed_off, solo, strict=True)
        if mine[FIRST_ROUNDS] != theirs[FIRST_ROUNDS]
    ]
    # Drafts, unlike the output, may change with the last bit of a logit where two are as good as equal.
    assert len(different) <= len(questions) // 30, different


def test_usage_counts_the_same_rounds_as_the_stream(
    system: System, questions: tuple[Question, ...]
) -> None:
    for question, answer in zip(questions[:8], ask(system, questions[:8]), strict=True):
        usage = answer.completion.usage
        assert usage.prompt_tokens == len(question.token_ids)
        assert usage.completion_tokens == len(answer.token_ids) == NUM_TOKENS
        assert usage.rounds == len(answer.rounds) - 1
        # One token of prefill's, and in every round one of the target's own.
        assert usage.completion_tokens == 1 + usage.rounds + usage.accepted_tokens
        assert usage.accepted_tokens <= usage.draft_tokens <= 7 * usage.rounds


def test_without_the_drafters_rows_the_first_rounds_suffer_and_the_output_does_not(
    servers: EventLoop,
    shipped_checkpoint: Path,
    questions: tuple[Question, ...],
    in_process: list[Output],
    figure: Callable[[str], None],
) -> None:
    """The control of the test above: what it would look like if the drafter's rows were lost."""
    options = SystemOptions(checkpoint_dir=shipped_checkpoint, sends_drafter_state=False)
    with System(servers, options).running() as system:
        answers = ask(system, questions)
        system.wait_at_rest()
    assert [a.token_ids for a in answers] == [output.token_ids for output in in_process]
    assert all(answer.completion.route.drafter_fallback for answer in answers)
    # Nothing was drafted, so the first round verifies nothing.
    assert {answer.rounds[1] for answer in answers} == {1}
    bootstrapped = sum(map(sum, first_rounds([answer.rounds for answer in answers])))
    in_one = sum(map(sum, first_rounds([output.rounds for output in in_process])))
    figure(f"tokens of rounds 1-3: {in_one} with the drafter's rows, {bootstrapped} without")
    assert bootstrapped < 0.9 * in_one


def test_a_prefill_worker_without_a_drafter_serves_one_that_has_it_and_says_so(
    servers: EventLoop,
    shipped_checkpoint: Path,
    questions: tuple[Question, ...],
    in_process: list[Output],
    tmp_path: Path,
) -> None:
    """Its target is the same, so the router takes both for one model."""
    options = SystemOptions(
        checkpoint_dir=shipped_checkpoint,
        prefill_checkpoint_dir=without_drafter(shipped_checkpoint, tmp_path / "bare"),
    )
    with System(servers, options).running() as system:
        answers = ask(system, questions[:12])
        with dspark.Client(system.address) as client:
            details = client.server_info().details
        system.wait_at_rest()
    assert [a.token_ids for a in answers] == [output.token_ids for output in in_process[:12]]
    fallback = "the prefill worker sent no drafter state: prefill has no drafter"
    assert {answer.completion.route.drafter_fallback for answer in answers} == {fallback}
    assert {answer.rounds[1] for answer in answers} == {1}
    # After a while it drafts as ever.
    assert all(answer.completion.usage.accepted_tokens for answer in answers)
    told = details[f"{system.prefill_address} drafter_state {system.decode_address}"]
    assert told == "not sent: prefill has no drafter"
