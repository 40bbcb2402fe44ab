"""How far the engine takes a request: to its commits, to its first token, and on from where it was cut back."""

from __future__ import annotations

import random

from common.engine.request import Role
from common.types import RequestId
from tests.support.engine_bench import EngineBench, Wanted, random_tokens
from tests.support.small_engine import MODEL, alone


def test_a_request_waits_for_its_commits_and_goes_on_with_them() -> None:
    bench = EngineBench(MODEL, draft_length=5, max_uncommitted_rounds=2)
    request = bench.add(Wanted(prompt=random_tokens(20, seed=1), max_length=100))
    engine = bench.engine
    for expected_round in (1, 2):
        assert engine.has_work
        engine.step()
        assert request.round == expected_round
    assert not engine.has_work
    assert engine.step().rounds == ()  # asked for nothing, it does nothing
    engine.commit(request.request_id, 1)
    assert engine.has_work
    engine.step()
    assert request.round == 3 and not engine.has_work
    engine.commit(request.request_id, 1)  # an old commit that comes again
    assert not engine.has_work
    engine.commit(request.request_id, 3)
    assert engine.has_work
    engine.commit(RequestId("unknown"), 7)


def test_a_waiting_request_does_not_hold_up_the_others() -> None:
    bench = EngineBench(MODEL, draft_length=5, max_uncommitted_rounds=1)
    waiting = bench.add(Wanted(prompt=random_tokens(20, seed=1), max_length=60))
    running = bench.add(Wanted(prompt=random_tokens(9, seed=2), max_length=60))
    for _ in range(5):
        bench.engine.step()
        bench.engine.commit(running.request_id, running.round)
    assert (waiting.round, running.round) == (1, 5)


def test_until_first_token_ends_with_one_token_and_a_proposal() -> None:
    bench = EngineBench(MODEL, draft_length=5, max_step_rows=50)
    wanted = Wanted(prompt=random_tokens(133, seed=1), max_length=200, role=Role.UNTIL_FIRST_TOKEN)
    request = bench.add(wanted)
    steps = 0
    while bench.engine.has_work:
        report = bench.step()
        steps += 1
        assert report.progressed == ((request,) if steps < 3 else ())
    assert steps == 3
    assert len(request.tokens) == 134 and request.num_computed == 133 and request.round == 1
    assert request.draft is not None and request.draft.probs is None
    assert len(request.draft.proposal.token_ids) == 5
    assert all(0 < confidence < 1 for confidence in request.draft.proposal.confidences)


def test_removing_gives_the_request_back_once() -> None:
    bench = EngineBench(MODEL, draft_length=5)
    request = bench.add(Wanted(prompt=random_tokens(5, seed=1), max_length=60))
    bench.step()
    assert bench.engine.remove(request.request_id) is request
    assert bench.engine.remove(request.request_id) is None
    assert not bench.engine.has_work and bench.engine.num_requests == 0


def test_a_request_that_is_cut_back_continues_from_there() -> None:
    """A commit may take fewer tokens than were verified: dropping them is all that it takes."""
    prompt = random_tokens(118, seed=6)
    whole = alone(Wanted(prompt=prompt, max_length=160))
    bench = EngineBench(MODEL, draft_length=5)
    rng = random.Random(7)
    request = bench.add(Wanted(prompt=prompt, max_length=160))
    while bench.engine.has_work:
        bench.step()
        gained = len(bench.generated[request.request_id].rounds[-1].token_ids)
        if len(request.tokens) > 125 and rng.random() < 0.3 and request.room:
            request.tokens = request.tokens[: -rng.randint(1, gained)]
            request.num_computed = len(request.tokens) - 1
            request.draft = None
    assert request.tokens[118:] == whole.tokens
