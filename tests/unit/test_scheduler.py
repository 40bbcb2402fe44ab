"""Which rows a step gets: within the budget, prompts and generation side by side, likeliest drafts first."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from common.engine.config import EngineConfig
from common.engine.request import Draft, Request, Role
from common.engine.scheduler import ScheduledRequest, Scheduler
from common.types import Proposal, RequestId, SamplingParams


def make_request(
    name: str,
    *,
    length: int,
    computed: int,
    confidences: tuple[float, ...] = (),
    max_length: int = 1000,
    role: Role = Role.GENERATE,
    round: int = 0,
) -> Request:
    draft = None
    if confidences:
        ids = tuple(range(len(confidences)))
        draft = Draft(proposal=Proposal(token_ids=ids, confidences=confidences))
    return Request(
        request_id=RequestId(name),
        epoch=1,
        role=role,
        tokens=[0] * length,
        num_computed=computed,
        max_length=max_length,
        sampling=SamplingParams(),
        slot=0,
        block_table=[],
        draft=draft,
        round=round,
    )


def scheduler_of(requests: list[Request], rows: int, draft_length: int = 3) -> Scheduler:
    scheduler = Scheduler(
        EngineConfig(draft_length=draft_length, max_step_rows=rows, max_context_length=1000)
    )
    for request in requests:
        scheduler.add(request)
    return scheduler


def widths(step: list[ScheduledRequest]) -> dict[str, tuple[int, int]]:
    return {s.request.request_id: (s.num_tokens, s.num_draft) for s in step}


def survival(confidences: tuple[float, ...], count: int) -> float:
    """Expected accepted drafts among the first `count`."""
    return sum(math.prod(confidences[: j + 1]) for j in range(count))


generating = st.builds(
    lambda c: (10, 9, tuple(c)), st.lists(st.floats(0.01, 1.0), min_size=0, max_size=3)
)
prompting = st.builds(lambda n, done: (n + done, done, ()), st.integers(2, 60), st.integers(0, 9))


@given(
    states=st.lists(st.one_of(generating, prompting), min_size=1, max_size=8),
    rows=st.integers(4, 40),
)
def test_every_step_stays_within_its_budget_and_moves_somebody(
    states: list[tuple[int, int, tuple[float, ...]]], rows: int
) -> None:
    requests = [
        make_request(f"r{i}", length=length, computed=computed, confidences=confidences)
        for i, (length, computed, confidences) in enumerate(states)
    ]
    step = scheduler_of(requests, rows).schedule()
    assert 0 < sum(s.num_rows for s in step) <= rows
    assert len({s.request.request_id for s in step}) == len(step)
    for s in step:
        assert 1 <= s.num_tokens <= s.request.num_uncomputed
        assert s.num_draft == 0 or s.is_sampling
        if s.num_draft:
            assert s.request.draft is not None
            assert s.num_draft <= len(s.request.draft.proposal.token_ids)
    if any(request.num_uncomputed > 1 for request in requests):
        assert any(s.request.num_uncomputed > 1 for s in step), "prompts are starved"
    if any(request.num_uncomputed == 1 for request in requests):
        assert any(s.request.num_uncomputed == 1 for s in step), "generation is starved"


@given(
    confidences=st.lists(
        st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3
    ),
    spare=st.integers(0, 9),
)
def test_a_tight_budget_admits_the_prefixes_most_likely_to_survive(
    confidences: list[tuple[float, ...]], spare: int
) -> None:
    """Brute force over all widths: none has a higher expected number of accepted drafts."""
    rows = max(4, len(confidences) + spare)
    requests = [
        make_request(f"r{i}", length=10, computed=9, confidences=c)
        for i, c in enumerate(confidences)
    ]
    step = scheduler_of(requests, rows).schedule()
    found = sum(survival(c, s.num_draft) for c, s in zip(confidences, step, strict=True))
    budget = rows - len(confidences)
    best = max(
        sum(survival(c, w) for c, w in zip(confidences, choice, strict=True))
        for choice in itertools.product(*(range(len(c) + 1) for c in confidences))
        if sum(choice) <= budget
    )
    assert math.isclose(found, best, rel_tol=1e-9)


def test_a_prompt_is_cut_into_what_generation_leaves() -> None:
    running = make_request("running", length=10, computed=9, confidences=(0.9, 0.9, 0.9))
    prompt = make_request("prompt", length=100, computed=0)
    assert widths(scheduler_of([running, prompt], 20).schedule()) == {
        "running": (1, 3),
        "prompt": (16, 0),
    }


def test_many_generating_requests_leave_prompts_their_share() -> None:
    running = [
        make_request(f"r{i}", length=10, computed=9, confidences=(0.9, 0.8, 0.7)) for i in range(8)
    ]
    prompt = make_request("prompt", length=100, computed=0)
    step = scheduler_of([*running, prompt], 16).schedule()
    assert widths(step)["prompt"] == (4, 0)
    assert sum(s.num_rows for s in step) == 16


def test_prompts_are_taken_in_order_of_arrival() -> None:
    prompts = [make_request(f"p{i}", length=30, computed=0) for i in range(3)]
    assert widths(scheduler_of(prompts, 50).schedule()) == {"p0": (30, 0), "p1": (20, 0)}


def test_every_request_reaches_its_end_with_the_smallest_budget() -> None:
    """Steps of two rows, more requests than rows: nobody waits for ever."""
    requests = [make_request(f"g{i}", length=5, computed=4, max_length=9) for i in range(4)]
    requests += [make_request(f"p{i}", length=12, computed=0, max_length=14) for i in range(2)]
    scheduler = scheduler_of(requests, 2, draft_length=1)
    for _ in range(100):
        step = scheduler.schedule()
        if not step:
            break
        for s in step:
            s.request.num_computed += s.num_tokens
            if s.request.num_uncomputed == 0:
                s.request.tokens.append(0)
                s.request.round += 1
                s.request.acknowledged_round += 1
    assert all(request.room == 0 for request in requests)
    assert not scheduler.has_work


def test_drafts_never_reach_past_a_requests_length_or_the_context() -> None:
    near = make_request("near", length=10, computed=9, confidences=(0.9,) * 3, max_length=12)
    last = make_request("last", length=10, computed=9, confidences=(0.9,) * 3, max_length=11)
    full = make_request("full", length=10, computed=9, confidences=(0.9,) * 3, max_length=10)
    context = make_request("context", length=998, computed=997, confidences=(0.9,) * 3)
    fits = make_request("fits", length=997, computed=996, confidences=(0.9,) * 3)
    step = scheduler_of([near, last, full, context, fits], 50).schedule()
    assert widths(step) == {"near": (1, 1), "last": (1, 0), "context": (1, 0), "fits": (1, 2)}


def test_a_request_that_hands_off_is_done_after_its_first_token() -> None:
    request = make_request("r", length=10, computed=9, role=Role.UNTIL_FIRST_TOKEN, round=1)
    scheduler = scheduler_of([request], 10)
    assert not scheduler.has_work and scheduler.schedule() == []


def test_a_cut_proposal_is_a_prefix_and_equals_are_shared_out_fairly() -> None:
    requests = [
        make_request(f"r{i}", length=10, computed=9, confidences=(1.0, 1.0, 1.0)) for i in range(3)
    ]
    step = scheduler_of(requests, 3 + 4).schedule()
    assert [s.num_draft for s in step] == [2, 1, 1]
