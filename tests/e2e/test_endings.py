"""How requests end: at a stop string, a stop token, a limit, or because somebody has had enough."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import dspark
from common.tokenizer import Tokenizer
from tests.support.asking import GREEDY, Answer, Ask, ask_all, exactly
from tests.support.questions import Question
from tests.support.system import System

pytestmark = pytest.mark.e2e

NUM_TOKENS = 64


@pytest.fixture
def client(system: System) -> Iterator[dspark.Client]:
    with dspark.Client(system.address, timeout=60.0) as opened:
        yield opened


@pytest.fixture(scope="module")
def code(questions: tuple[Question, ...]) -> list[Question]:
    """Prompts whose continuation is text and goes on for long."""
    return [q for q in questions if q.domain == "code" and q.is_unseen][:6]


@pytest.fixture(scope="module")
def whole(system: System, code: list[Question]) -> list[Answer]:
    """What the prompts give when nothing stops them."""
    return ask_all(
        system.address, [Ask(prompt=q.token_ids, stop=exactly(NUM_TOKENS)) for q in code]
    )


def shown_after_each_round(answer: Answer) -> list[str]:
    shown, text = [], ""
    for event in answer.events:
        text += event.text
        shown.append(text)
    return shown


def stops_across_rounds(answer: Answer) -> list[str]:
    """Texts that begin in one round's tokens and end in another's, each where it occurs first."""
    text = answer.completion.text
    ends = [len(shown) for shown in shown_after_each_round(answer)]
    candidates = [text[max(0, end - 4) : end + 4] for end in ends[1:-1] if end + 4 <= len(text)]
    return [stop for stop in candidates if len(stop) == 8]


def test_a_stop_string_across_rounds_ends_the_text_before_it_and_no_part_of_it_is_shown(
    system: System, code: list[Question], whole: list[Answer]
) -> None:
    num_checked = 0
    for question, answer in zip(code, whole, strict=True):
        stops = stops_across_rounds(answer)[::5]
        asks = [
            Ask(prompt=question.token_ids, stop=replace(exactly(NUM_TOKENS), stop=(stop,)))
            for stop in stops
        ]
        for stop, stopped in zip(stops, ask_all(system.address, asks), strict=True):
            expected = answer.completion.text.partition(stop)[0]
            assert stopped.completion.finish_reason == "stop"
            assert stopped.completion.matched_stop == stop
            assert stopped.completion.text == expected
            assert all(expected.startswith(shown) for shown in shown_after_each_round(stopped))
            # The tokens are those of the plain run, up to the one that completed the stop string.
            num_tokens = len(stopped.token_ids)
            assert stopped.token_ids == answer.token_ids[:num_tokens]
            num_checked += 1
    assert num_checked >= 6


def test_of_several_stop_strings_the_one_that_ends_first_counts(
    system: System, code: list[Question], whole: list[Answer]
) -> None:
    text = whole[0].completion.text
    early, late = text[12:18], text[40:46]
    stop = replace(exactly(NUM_TOKENS), stop=("never to be seen", late, early))
    (answer,) = ask_all(system.address, [Ask(prompt=code[0].token_ids, stop=stop)])
    assert answer.completion.matched_stop == early
    assert answer.completion.text == text[: text.index(early)]


def test_a_stop_token_ends_the_request_within_a_round(
    system: System, code: list[Question], whole: list[Answer]
) -> None:
    """Every token that occurs for the first time ends the request exactly there, wherever its round ends."""
    tokens = whole[1].token_ids
    firsts = [i for i, token in enumerate(tokens) if tokens.index(token) == i][1:24:3]
    asks = [
        Ask(
            prompt=code[1].token_ids,
            stop=replace(exactly(NUM_TOKENS), stop_token_ids=(tokens[i],)),
        )
        for i in firsts
    ]
    for i, answer in zip(firsts, ask_all(system.address, asks), strict=True):
        assert answer.token_ids == tokens[: i + 1]
        assert answer.completion.matched_token_id == tokens[i]
        assert answer.completion.finish_reason == "stop"
        assert answer.completion.usage.completion_tokens == i + 1


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 9, 31])
def test_max_tokens_is_met_exactly_wherever_it_cuts_a_round(
    system: System, code: list[Question], whole: list[Answer], max_tokens: int
) -> None:
    asks = [Ask(prompt=question.token_ids, stop=exactly(max_tokens)) for question in code]
    for answer, full in zip(ask_all(system.address, asks), whole, strict=True):
        assert answer.token_ids == full.token_ids[:max_tokens]
        assert answer.completion.finish_reason == "length"
        usage = answer.completion.usage
        assert usage.completion_tokens == max_tokens == sum(answer.rounds)
        assert usage.rounds == len(answer.rounds) - 1


def test_min_tokens_outlasts_stop_tokens_and_stop_strings(
    system: System, code: list[Question], whole: list[Answer]
) -> None:
    question, full = code[2], whole[2]
    early_token, early_text = full.token_ids[2], full.completion.text[:2]
    stop = replace(
        exactly(NUM_TOKENS), min_tokens=20, stop=(early_text,), stop_token_ids=(early_token,)
    )
    (answer,) = ask_all(system.address, [Ask(prompt=question.token_ids, stop=stop)])
    assert 20 <= len(answer.token_ids) <= NUM_TOKENS
    assert answer.token_ids == full.token_ids[: len(answer.token_ids)]


def test_the_context_may_be_filled_to_its_last_position(
    system: System, code: list[Question], client: dspark.Client
) -> None:
    """Near the end a whole proposal does not fit any more; the request goes on without drafts."""
    limit = client.model_info().max_context_length
    prompt = (code[0].token_ids * (limit // len(code[0].token_ids) + 1))[: limit - 24]
    answer = client.generate(
        prompt, sampling=GREEDY, stop=dspark.StopParams(ignore_eos=True), timeout=60.0
    )
    assert answer.finish_reason == "length"
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == limit


def test_text_never_has_half_a_character(
    system: System, shipped_checkpoint: Path, client: dspark.Client
) -> None:
    """A model that draws at random writes bytes that are no characters; what is shown adds up all the same."""
    tokenizer = Tokenizer.from_folder(shipped_checkpoint)
    prompt = tuple(tokenizer.encode("# Grüße: ü ö ä 中文 🙂 é ñ\nprint('", add_special_tokens=True))
    sampling = [dspark.SamplingParams(temperature=3.0, seed=seed) for seed in range(4)]
    asks = [Ask(prompt=prompt, sampling=params, stop=exactly(48)) for params in sampling]
    for answer in ask_all(system.address, asks):
        assert answer.completion.text == tokenizer.decode(answer.token_ids)
        assert "".join(event.text for event in answer.events) == answer.completion.text


def test_cancelled_requests_free_both_sides_in_any_phase(
    system: System, code: list[Question], client: dspark.Client
) -> None:
    """`nothing_is_left_behind` waits longer for the room to be as it was; here it has to happen within a second."""

    def leave(question: Question, num_rounds: int) -> None:
        with client.generate(question.token_ids, stop=exactly(512), stream=True) as stream:
            for _ in range(num_rounds):
                next(stream)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(leave, code, range(6)))
    system.wait_at_rest(within_s=1.0)


def test_an_aborted_request_ends_well_with_what_it_has(
    client: dspark.Client, code: list[Question], whole: list[Answer]
) -> None:
    with client.generate(
        code[0].token_ids, sampling=GREEDY, stop=exactly(2000), request_id="unwanted", stream=True
    ) as stream:
        next(stream)
        assert client.abort("unwanted")
        completion = stream.read()
    assert completion.finish_reason == "abort"
    num_same = min(len(completion.token_ids), NUM_TOKENS)
    assert completion.token_ids[:num_same] == whole[0].token_ids[:num_same]
    assert not client.abort("unwanted")


def test_a_deadline_ends_a_running_request_with_what_has_arrived_in_the_error(
    client: dspark.Client, code: list[Question]
) -> None:
    with pytest.raises(dspark.APITimeoutError):
        client.generate(code[0].token_ids, stop=exactly(2000), timeout=0.5)
