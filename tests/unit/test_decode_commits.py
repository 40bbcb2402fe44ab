from __future__ import annotations

import asyncio

import pytest

from common.engine.request import Request, Role, RoundResult
from common.errors import InvalidRequest
from common.types import RequestId, SamplingParams
from services.decode.commits import CommitOrder, Outbox, UncommittedRounds
from services.decode.events import Finished


def result(number: int, base: int, num_tokens: int) -> RoundResult:
    request = Request(
        request_id=RequestId("r"),
        epoch=0,
        role=Role.GENERATE,
        tokens=[1],
        max_length=100,
        sampling=SamplingParams(),
        slot=0,
        block_table=[0],
    )
    return RoundResult(
        request=request,
        round=number,
        base=base,
        token_ids=tuple(range(num_tokens)),
        num_draft=num_tokens,
        num_accepted=num_tokens - 1,
        confidences=(),
    )


def order(number: int, length: int, *, finish: bool = False) -> CommitOrder:
    return CommitOrder(round=number, length=length, finish=finish)


@pytest.fixture
def rounds() -> UncommittedRounds:
    """Rounds 1 to 3 are offered on top of 10 tokens: they end at 13, 14 and 18."""
    rounds = UncommittedRounds(10)
    for number, base, num_tokens in ((1, 10, 3), (2, 13, 1), (3, 14, 4)):
        rounds.offer(result(number, base, num_tokens))
    return rounds


def test_a_commit_takes_the_rounds_before_it_along(rounds: UncommittedRounds) -> None:
    assert rounds.accept(order(2, 14))
    assert (rounds.committed_round, rounds.committed_length, rounds.last_round) == (2, 14, 3)
    assert rounds.accept(order(3, 18))


def test_a_repeated_or_older_commit_says_nothing_new(rounds: UncommittedRounds) -> None:
    rounds.accept(order(2, 14))
    assert not rounds.accept(order(2, 14))
    assert not rounds.accept(order(1, 13))
    assert not rounds.accept(order(0, 10))
    assert rounds.committed_length == 14


def test_a_round_that_was_not_offered_cannot_be_committed(rounds: UncommittedRounds) -> None:
    with pytest.raises(InvalidRequest, match="commit of round 4, but the last one offered is 3"):
        rounds.accept(order(4, 18))


@pytest.mark.parametrize("length", [12, 14, 18])
def test_only_a_finish_may_cut_a_round(rounds: UncommittedRounds, length: int) -> None:
    with pytest.raises(InvalidRequest, match="but it ends at 13"):
        rounds.accept(order(1, length))


@pytest.mark.parametrize("length", [10, 11, 13, 18])
def test_a_finish_may_end_anywhere_in_what_was_offered(
    rounds: UncommittedRounds, length: int
) -> None:
    assert rounds.accept(order(3, length, finish=True))


@pytest.mark.parametrize("length", [9, 19])
def test_a_finish_beyond_what_was_offered_is_refused(
    rounds: UncommittedRounds, length: int
) -> None:
    with pytest.raises(InvalidRequest, match="between the committed 10 and the offered 18"):
        rounds.accept(order(3, length, finish=True))


def test_rounds_must_follow_one_another(rounds: UncommittedRounds) -> None:
    with pytest.raises(AssertionError, match="base"):
        rounds.offer(result(4, 17, 1))
    with pytest.raises(AssertionError, match="round"):
        rounds.offer(result(5, 18, 1))


def finished(number: int) -> Finished:
    return Finished(request_id=RequestId(f"r{number}"), epoch=0)


async def test_all_events_of_a_step_leave_together() -> None:
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.put(finished(1))
    outbox.put(finished(2))
    assert await taking == [finished(1), finished(2)]
    outbox.put(finished(3))
    assert await outbox.take() == [finished(3)]


async def test_a_closed_outbox_gives_out_what_it_has_and_takes_no_more() -> None:
    outbox = Outbox()
    outbox.put(finished(1))
    outbox.close()
    outbox.put(finished(2))
    assert await outbox.take() == [finished(1)]
    assert await outbox.take() == []
