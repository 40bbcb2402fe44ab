"""The commit rule, alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import WorkerLost
from common.types import (
    FinishReason,
    RequestContext,
    RequestId,
    SamplingParams,
    StopParams,
    TokenLogprob,
)
from services.router.commits import Commits, Committed, Finish, Round
from services.router.text import TextStream

EOS = 1
PROMPT = (7, 8, 9)


class Letters:
    """Token 10 is "a", 11 is "b", and so on; smaller tokens have no text."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id - 10) if token_id >= 10 else ""

    def flush(self) -> str:
        return ""


def commits(*, epoch: int = 0, **stop: Any) -> Commits:
    params = StopParams(**{"max_tokens": 100, **stop})
    context = RequestContext(
        request_id=RequestId("r"),
        epoch=epoch,
        prompt=PROMPT,
        sampling=SamplingParams(),
        stop=params,
    )
    result = Commits(context, TextStream(Letters(), params.stop), eos_token_ids=(EOS,))
    result.begin()
    return result


def round_of(
    number: int, base: int, *token_ids: int, epoch: int = 0, logprobs: bool = False
) -> Round:
    return Round(
        epoch=epoch,
        number=number,
        base=base,
        token_ids=token_ids,
        num_draft=7,
        num_accepted=len(token_ids) - 1,
        logprobs=tuple(TokenLogprob(token_id=t, logprob=-1.0) for t in token_ids)
        if logprobs
        else (),
    )


def test_rounds_extend_the_first_token() -> None:
    c = commits()
    c.commit_first_token(0, 10, None)
    committed = c.commit_round(round_of(1, 4, 11, 12))
    assert committed == Committed(
        round=1, length=6, token_ids=(11, 12), text="bc", logprobs=(), finish=None
    )
    assert c.context.committed == [10, 11, 12]


def test_the_second_report_of_the_first_token_adds_nothing() -> None:
    c = commits()
    assert c.commit_first_token(0, 10, None) is not None
    assert c.commit_first_token(0, 10, None) is None
    assert c.context.committed == [10]


def test_workers_that_disagree_on_the_first_token_are_not_believed() -> None:
    c = commits()
    c.commit_first_token(0, 10, None)
    with pytest.raises(WorkerLost, match="10, 11"):
        c.commit_first_token(0, 11, None)


def test_late_and_repeated_rounds_add_nothing() -> None:
    c = commits()
    c.commit_first_token(0, 10, None)
    c.commit_round(round_of(1, 4, 11))
    c.commit_round(round_of(2, 5, 12))
    assert c.commit_round(round_of(2, 5, 12)) is None
    assert c.commit_round(round_of(1, 4, 11)) is None
    assert c.context.committed == [10, 11, 12]


def test_messages_of_an_older_epoch_add_nothing() -> None:
    c = commits()
    c.commit_first_token(0, 10, None)
    c.next_epoch()
    c.begin()
    assert c.commit_round(round_of(1, 4, 11)) is None
    assert c.commit_first_token(0, 11, None) is None
    assert c.commit_first_token(1, 11, None) is not None
    assert c.commit_round(round_of(1, 5, 12, epoch=1)) is not None
    assert c.context.committed == [10, 11, 12]


@pytest.mark.parametrize("base", [3, 5, 6])
def test_a_round_that_does_not_extend_what_is_committed_is_a_lost_message(base: int) -> None:
    c = commits()
    c.commit_first_token(0, 10, None)
    with pytest.raises(WorkerLost, match=f"after {base}, but 4"):
        c.commit_round(round_of(1, base, 11))
    assert c.context.committed == [10]


def test_a_round_without_tokens_is_a_lost_message() -> None:
    c = commits()
    with pytest.raises(WorkerLost):
        c.commit_round(round_of(1, 3))


def test_max_tokens_cuts_a_round() -> None:
    c = commits(max_tokens=3)
    c.commit_first_token(0, 10, None)
    committed = c.commit_round(round_of(1, 4, 11, 12, 13, 14))
    assert committed is not None
    assert committed.token_ids == (11, 12)
    assert committed.length == 6
    assert committed.finish == Finish(reason=FinishReason.LENGTH)


def test_the_end_of_sequence_cuts_a_round_and_is_part_of_it() -> None:
    c = commits()
    committed = c.commit_round(round_of(1, 3, 10, EOS, 12))
    assert committed is not None
    assert committed.token_ids == (10, EOS)
    assert committed.finish == Finish(reason=FinishReason.STOP, matched_token_id=EOS)


def test_the_end_of_sequence_can_be_ignored() -> None:
    c = commits(ignore_eos=True)
    committed = c.commit_round(round_of(1, 3, 10, EOS, 12))
    assert committed is not None and committed.finish is None
    assert committed.text == "ac"


def test_a_stop_token_is_committed_but_not_shown() -> None:
    c = commits(stop_token_ids=(12,))
    committed = c.commit_round(round_of(1, 3, 10, 11, 12, 13))
    assert committed is not None
    assert committed.token_ids == (10, 11, 12)
    assert committed.text == "ab"
    assert committed.finish == Finish(reason=FinishReason.STOP, matched_token_id=12)


def test_a_stop_string_may_span_rounds() -> None:
    c = commits(stop=("bcd",))
    first = c.commit_round(round_of(1, 3, 10, 11))
    second = c.commit_round(round_of(2, 5, 12, 13, 14))
    assert first is not None and first.text == "a"
    assert second is not None and second.text == ""
    assert second.token_ids == (12, 13)
    assert second.finish == Finish(reason=FinishReason.STOP, matched_stop="bcd")


def test_held_text_comes_when_the_request_ends_for_another_reason() -> None:
    c = commits(stop=("bcd",), max_tokens=2)
    committed = c.commit_round(round_of(1, 3, 10, 11))
    assert committed is not None and committed.text == "ab"


def test_no_stop_condition_ends_a_request_before_min_tokens() -> None:
    c = commits(min_tokens=4, stop=("b",), stop_token_ids=(12,))
    committed = c.commit_round(round_of(1, 3, EOS, 11, 12, 10, 11))
    assert committed is not None
    assert committed.token_ids == (EOS, 11, 12, 10, 11)
    assert committed.text == "bca"
    assert committed.finish == Finish(reason=FinishReason.STOP, matched_stop="b")


def test_logprobs_are_cut_with_the_tokens() -> None:
    c = commits(max_tokens=2)
    committed = c.commit_round(round_of(1, 3, 10, 11, 12, logprobs=True))
    assert committed is not None
    assert [logprob.token_id for logprob in committed.logprobs] == [10, 11]


def test_drafts_that_were_cut_are_not_counted_as_accepted() -> None:
    c = commits(max_tokens=4)
    c.commit_first_token(0, 10, None)
    c.commit_round(round_of(1, 4, 11))
    c.commit_round(round_of(2, 5, 12, 13, 14, 15))
    assert (c.counts.rounds, c.counts.draft_tokens, c.counts.accepted_tokens) == (2, 14, 2)


def test_a_prompt_that_decode_computed_is_no_round() -> None:
    c = commits()
    c.commit_round(replace(round_of(1, 3, 10), num_draft=0))
    assert c.counts.rounds == 0
    c.commit_round(round_of(2, 4, 11, 12))
    assert c.counts.rounds == 1


def test_after_the_end_nothing_is_added() -> None:
    c = commits(max_tokens=1)
    c.commit_first_token(0, 10, None)
    assert c.commit_round(round_of(1, 4, 11)) is None
    assert c.context.committed == [10]


def test_an_aborted_request_shows_what_was_held() -> None:
    c = commits(stop=("abc",))
    c.commit_round(round_of(1, 3, 10, 11))
    committed = c.abort()
    assert committed.text == "ab" and committed.token_ids == ()
    assert committed.finish == Finish(reason=FinishReason.ABORT)


@given(
    tokens=st.lists(st.sampled_from([EOS, 10, 11]), min_size=1, max_size=24),
    cuts=st.lists(st.integers(1, 5), max_size=24),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple),
    max_tokens=st.integers(1, 24),
    min_tokens=st.integers(0, 8),
)
def test_a_request_ends_at_the_same_token_however_it_is_split_into_rounds(
    tokens: list[int], cuts: list[int], stops: tuple[str, ...], max_tokens: int, min_tokens: int
) -> None:
    stop: dict[str, Any] = {
        "stop": stops,
        "max_tokens": max_tokens,
        "min_tokens": min(min_tokens, max_tokens),
    }
    one_by_one, in_rounds = commits(**stop), commits(**stop)
    assert feed(one_by_one, tokens, [1] * len(tokens)) == feed(in_rounds, tokens, cuts)
    assert one_by_one.context.committed == in_rounds.context.committed
    assert one_by_one.finish == in_rounds.finish


def feed(c: Commits, tokens: list[int], cuts: list[int]) -> str:
    """All the text that is shown when `tokens` come in rounds of the sizes `cuts`, the rest in one."""
    text, position, number = "", 0, 0
    while position < len(tokens):
        size = cuts[number] if number < len(cuts) else len(tokens)
        number += 1
        committed = c.commit_round(
            round_of(number, len(PROMPT) + position, *tokens[position : position + size])
        )
        position += size
        if committed is not None:
            text += committed.text
            if committed.finish is not None:
                return text
    return text + c.abort().text if c.finish is None else text
