"""The engine gives a request the same tokens alone, in a batch, with speculation, in chunks and after a move."""

from __future__ import annotations

import dataclasses
import random
from functools import cache

import pytest
import torch

from common.engine.request import Draft, Request, Role, StepReport
from common.types import Proposal, RequestId, SamplingParams, Verification
from tests.support.engine_bench import (
    GREEDY,
    EngineBench,
    Generated,
    Wanted,
    copy_state,
    random_tokens,
    small_model,
)

MODEL = small_model(drafter=True)
TARGET_ONLY = small_model(drafter=False)
SEEDED = SamplingParams(temperature=0.8, seed=1234, logprobs=0)


def sixteen_requests() -> list[Wanted]:
    """Lengths at both sides of every border, and every kind of sampling."""
    lengths = (1, 2, 3, 4, 5, 17, 40, 126, 127, 128, 129, 130, 255, 256, 257, 300)
    samplings = (
        GREEDY,
        SEEDED,
        SamplingParams(temperature=1.0, seed=5, top_k=8, logprobs=2),
        SamplingParams(temperature=1.3, seed=6, top_p=0.8, logprobs=0),
        SamplingParams(temperature=0.7, seed=7, verification=Verification.REJECTION, logprobs=0),
    )
    return [
        Wanted(
            prompt=random_tokens(length, seed=100 + i),
            max_length=length + 9 + i % 4,
            sampling=samplings[i % len(samplings)],
        )
        for i, length in enumerate(lengths)
    ]


@cache
def alone(wanted: Wanted) -> Generated:
    return EngineBench(MODEL, draft_length=5, num_slots=1).run(wanted)[0]


def accepted(outputs: list[Generated]) -> int:
    return sum(result.num_accepted for output in outputs for result in output.rounds)


# Batches ---------------------------------------------------------------------------------------------------------


def test_sixteen_different_requests_equal_their_solo_runs() -> None:
    wanted = sixteen_requests()
    together = EngineBench(MODEL, draft_length=5, garbage=True).run(*wanted)
    assert accepted(together) > 0, "no draft was ever accepted, so nothing was shown"
    for w, output in zip(wanted, together, strict=True):
        output.require_equal(alone(w))
        assert len(output.tokens) == w.max_length - len(w.prompt)


@pytest.mark.parametrize("max_step_rows", [6, 50, 128])
def test_any_row_budget_gives_the_same_tokens(max_step_rows: int) -> None:
    """Small budgets cut prompts into odd chunks and drafts to odd widths; only rejection may notice the latter."""
    wanted = [w for w in sixteen_requests() if w.sampling.verification is Verification.COUPLED]
    wanted = wanted[::2] if max_step_rows == 6 else wanted
    expected = EngineBench(MODEL, draft_length=5).run(*wanted)

    def within_budget(report: StepReport) -> None:
        assert 0 < report.num_rows <= max_step_rows

    found = EngineBench(MODEL, draft_length=5, max_step_rows=max_step_rows).run(
        *wanted, each_step=within_budget
    )
    for ours, theirs in zip(found, expected, strict=True):
        ours.require_equal(theirs)


def test_late_arrivals_join_a_running_batch_without_changing_it() -> None:
    wanted = sixteen_requests()[4:12]
    bench = EngineBench(MODEL, draft_length=5)
    requests = []
    for w in wanted:
        requests.append(bench.add(w))
        bench.step()
    bench.drain()
    for w, request in zip(wanted, requests, strict=True):
        bench.generated[request.request_id].require_equal(alone(w))


# Speculation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_speculation_of_any_depth_gives_the_tokens_of_none(sampling: SamplingParams) -> None:
    wanted = [
        Wanted(prompt=random_tokens(n, seed=n), max_length=n + 30, sampling=sampling)
        for n in (3, 120, 250)
    ]
    plain = EngineBench(TARGET_ONLY, draft_length=0).run(*wanted)
    for draft_length in (1, 5, 7, 15):
        speculative = EngineBench(MODEL, draft_length=draft_length).run(*wanted)
        for ours, theirs in zip(speculative, plain, strict=True):
            ours.require_equal(theirs)
        for w, output in zip(wanted, speculative, strict=True):
            for result in output.rounds[1:]:
                assert result.num_draft == min(draft_length, w.max_length - result.base - 1)


def test_seeded_tokens_are_those_of_another_seed_never() -> None:
    """Guards the test above: if sampling ignored its noise, everything would agree."""
    wanted = Wanted(prompt=random_tokens(20, seed=1), max_length=60, sampling=SEEDED)
    other = dataclasses.replace(wanted, sampling=dataclasses.replace(SEEDED, seed=99))
    assert alone(wanted).tokens != alone(other).tokens


def test_a_request_at_the_context_limit_falls_back_alone() -> None:
    limit, draft_length = 140, 7
    bench = EngineBench(MODEL, draft_length=draft_length, max_length=limit)
    near = bench.add(Wanted(prompt=random_tokens(125, seed=1), max_length=limit, sampling=SEEDED))
    far = bench.add(Wanted(prompt=random_tokens(30, seed=2), max_length=100, sampling=SEEDED))
    bench.drain()
    near_rounds, far_rounds = (bench.generated[r.request_id].rounds for r in (near, far))
    for result in near_rounds[1:]:
        fits = result.base + draft_length <= limit
        assert result.num_draft == (draft_length if fits else 0), f"at {result.base}"
    assert any(result.num_draft == 0 for result in near_rounds[1:])
    assert all(result.num_draft == draft_length for result in far_rounds[1:4])
    assert len(near.tokens) == limit
    plain = EngineBench(TARGET_ONLY, draft_length=0).run(
        Wanted(prompt=random_tokens(125, seed=1), max_length=limit, sampling=SEEDED)
    )
    bench.generated[near.request_id].require_equal(plain[0])


@pytest.mark.parametrize("draft_length", [0, 5, 15])
@pytest.mark.parametrize("room", [1, 2, 3, 4, 9])
def test_a_request_stops_exactly_at_its_length(room: int, draft_length: int) -> None:
    model = MODEL if draft_length else TARGET_ONLY
    bench = EngineBench(model, draft_length=draft_length, num_slots=1)
    wanted = Wanted(prompt=random_tokens(10, seed=3), max_length=10 + room, sampling=SEEDED)
    request = bench.add(wanted)
    # Rightly guessed drafts are what could carry it beyond its length.
    truth = EngineBench(TARGET_ONLY, draft_length=0).run(
        dataclasses.replace(wanted, max_length=10 + room + 16)
    )[0]
    while bench.engine.has_work:
        bench.step()
        if draft_length and request.room:
            ids = truth.tokens[len(request.tokens) - 10 :][:draft_length]
            sure = (1.0,) * len(ids)
            request.draft = Draft(proposal=Proposal(token_ids=tuple(ids), confidences=sure))
    assert request.tokens[10:] == truth.tokens[:room]


def test_speculation_at_the_last_position_of_the_model_does_not_fail() -> None:
    """Formerly a draft block longer than dspark_block_size reached past the table of rotations there."""
    limit = 140
    model = small_model(drafter=True, max_position_embeddings=limit)
    bench = EngineBench(model, draft_length=15, max_length=limit)
    wanted = Wanted(prompt=random_tokens(130, seed=1), max_length=limit)
    assert len(bench.run(wanted)[0].tokens) == 10


def test_every_token_is_reported_with_the_alternatives_that_its_request_asked_for() -> None:
    counts = (None, 0, 3, 5)
    wanted = [
        Wanted(
            prompt=random_tokens(10 + i, seed=i),
            max_length=30,
            sampling=SamplingParams(temperature=0.0, logprobs=count),
        )
        for i, count in enumerate(counts)
    ]
    outputs = EngineBench(MODEL, draft_length=5).run(*wanted)
    for count, output in zip(counts, outputs, strict=True):
        for result in output.rounds:
            if count is None:
                assert result.logprobs == ()
                continue
            assert tuple(p.token_id for p in result.logprobs) == result.token_ids
            for logprob in result.logprobs:
                assert len(logprob.top) == count
                if count:
                    assert logprob.top[0] == (logprob.token_id, logprob.logprob)


# Commits and roles -----------------------------------------------------------------------------------------------


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


# Moves -----------------------------------------------------------------------------------------------------------


def hand_off(
    source: EngineBench,
    request: Request,
    destination: EngineBench,
    *,
    with_drafter: bool = True,
) -> Request:
    """What prefill and decode do, without a wire: live rows by position, then the same request."""
    slot = destination.take_slot()
    regions = [region.name for region in source.pool.layout.regions]
    if not with_drafter:
        regions.remove("drafter")
    copy_state(source, request, destination, slot, regions=regions)
    proposal = request.draft.proposal if request.draft is not None and with_drafter else None
    return destination.adopt(
        Request(
            request_id=request.request_id,
            epoch=request.epoch,
            role=Role.GENERATE,
            tokens=list(request.tokens),
            num_computed=request.num_computed,
            max_length=request.max_length,
            sampling=request.sampling,
            slot=slot,
            block_table=[],
            draft=None if proposal is None else Draft(proposal=proposal),
            round=request.round,
            acknowledged_round=request.round,
            drafter_valid_from=0 if with_drafter else request.num_computed,
        )
    )


@pytest.mark.parametrize("length", [1, 3, 15, 16, 127, 128, 129, 131, 256, 300])
def test_a_moved_request_goes_on_as_if_it_had_stayed(length: int) -> None:
    """The other side has other ring sizes, pages and slots, and memory full of somebody else's rows."""
    wanted = [
        Wanted(
            prompt=random_tokens(length, seed=length),
            max_length=length + 24,
            sampling=sampling,
            role=Role.UNTIL_FIRST_TOKEN,
        )
        for sampling in (GREEDY, SEEDED)
    ]
    prefill = EngineBench(MODEL, draft_length=5, num_slots=3)
    decode = EngineBench(MODEL, draft_length=7, num_slots=5, max_length=512, garbage=True)
    decode.take_slot()
    stayed = EngineBench(MODEL, draft_length=5)
    requests = [prefill.add(w) for w in wanted]
    prefill.drain()
    moved = [hand_off(prefill, request, decode) for request in requests]
    first_proposals = [request.draft for request in moved]
    assert all(draft is not None for draft in first_proposals)
    decode.drain()
    expected = stayed.run(*(dataclasses.replace(w, role=Role.GENERATE) for w in wanted))
    for request, whole in zip(moved, expected, strict=True):
        rest = decode.generated[request.request_id]
        Generated(whole.tokens[1:], whole.logprobs[1:]).require_equal(rest)
        # The proposal that travelled was verified: its acceptance is that of the request that stayed.
        assert rest.rounds[0].num_accepted == whole.rounds[1].num_accepted
        assert rest.rounds[0].confidences == pytest.approx(whole.rounds[1].confidences, abs=1e-4)


def test_a_moved_request_drafts_what_it_would_have_drafted() -> None:
    """The drafter's context really travels: the proposals behind the first one are the same too."""
    wanted = Wanted(
        prompt=random_tokens(150, seed=4),
        max_length=200,
        sampling=SEEDED,
        role=Role.UNTIL_FIRST_TOKEN,
    )
    prefill, decode = (EngineBench(MODEL, draft_length=5, garbage=g) for g in (False, True))
    request = prefill.add(wanted)
    prefill.drain()
    moved = hand_off(prefill, request, decode)
    decode.drain()
    stayed = alone(dataclasses.replace(wanted, role=Role.GENERATE))
    ours, theirs = decode.generated[moved.request_id].rounds, stayed.rounds[1:]
    assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.confidences == pytest.approx(b.confidences, abs=1e-4)


def test_without_drafter_rows_tokens_stay_exact_and_drafting_resumes() -> None:
    wanted = Wanted(
        prompt=random_tokens(140, seed=5),
        max_length=220,
        sampling=SEEDED,
        role=Role.UNTIL_FIRST_TOKEN,
    )
    prefill, decode = (EngineBench(MODEL, draft_length=5, garbage=g) for g in (False, True))
    request = prefill.add(wanted)
    prefill.drain()
    moved = hand_off(prefill, request, decode, with_drafter=False)
    decode.drain()
    output = decode.generated[moved.request_id]
    stayed = alone(dataclasses.replace(wanted, role=Role.GENERATE))
    Generated(stayed.tokens[1:], stayed.logprobs[1:]).require_equal(output)
    widths = {result.base: result.num_draft for result in output.rounds}
    own = {base: base - 140 for base in widths}
    assert all(widths[base] == 0 for base in widths if own[base] <= 32)
    assert all(widths[base] == 5 for base in widths if 40 < own[base] < 70)


@pytest.mark.parametrize("draft_length", [0, 1, 5])
def test_a_proposal_longer_than_ours_is_cut_to_what_our_rings_can_roll_back(
    draft_length: int,
) -> None:
    """Formerly all of it was verified, and its rejected rows overwrote live ones."""
    wanted = Wanted(prompt=random_tokens(143, seed=3), max_length=175, role=Role.UNTIL_FIRST_TOKEN)
    prefill = EngineBench(MODEL, draft_length=15)
    decode = EngineBench(
        MODEL if draft_length else TARGET_ONLY, draft_length=draft_length, garbage=True
    )
    request = prefill.add(wanted)
    prefill.drain()
    assert request.draft is not None and len(request.draft.proposal.token_ids) == 15
    moved = hand_off(prefill, request, decode, with_drafter=draft_length > 0)
    moved.draft = request.draft
    decode.drain()
    output = decode.generated[moved.request_id]
    assert all(result.num_draft <= draft_length for result in output.rounds)
    stayed = alone(dataclasses.replace(wanted, role=Role.GENERATE))
    Generated(stayed.tokens[1:], stayed.logprobs[1:]).require_equal(output)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_context_placed_again_elsewhere_goes_on_as_before(sampling: SamplingParams) -> None:
    """Prompt and committed tokens are enough: what crash, drain and migration rest on."""
    whole = Wanted(prompt=random_tokens(120, seed=2), max_length=150, sampling=sampling)
    tokens = alone(whole).tokens
    for num_committed in (1, 7, 8, 9, 29):
        context = (*whole.prompt, *tokens[:num_committed])
        bench = EngineBench(MODEL, draft_length=7, max_step_rows=50, garbage=True)
        again = bench.run(Wanted(prompt=context, max_length=150, sampling=sampling))[0]
        assert again.tokens == tokens[num_committed:]


def test_a_used_slot_tells_its_next_owner_nothing() -> None:
    bench = EngineBench(MODEL, draft_length=5, num_slots=1)
    for length in (300, 4, 129, 20):
        wanted = Wanted(
            prompt=random_tokens(length, seed=length), max_length=length + 20, sampling=SEEDED
        )
        again = bench.run(wanted)[0]
        fresh = alone(wanted)
        again.require_equal(fresh)
        assert [r.num_accepted for r in again.rounds] == [r.num_accepted for r in fresh.rounds]


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


def test_a_rejection_sampled_request_that_moved_is_first_verified_coupled() -> None:
    """Its drafts came without the distributions that rejection needs; later ones are made here."""
    sampling = SamplingParams(temperature=0.7, seed=8, verification=Verification.REJECTION)
    prefill, decode = (EngineBench(MODEL, draft_length=5, garbage=g) for g in (False, True))
    request = prefill.add(
        Wanted(
            prompt=random_tokens(50, seed=9),
            max_length=80,
            sampling=sampling,
            role=Role.UNTIL_FIRST_TOKEN,
        )
    )
    prefill.drain()
    moved = hand_off(prefill, request, decode)
    assert moved.draft is not None and moved.draft.probs is None
    first = decode.step().rounds[0]
    assert first.num_draft == 5
    assert moved.draft is not None and moved.draft.probs is not None
    decode.drain()
    assert len(moved.tokens) == 80


def test_a_bfloat16_engine_speculates_close_to_the_float32_one() -> None:
    model = small_model(drafter=True, dtype=torch.bfloat16)
    wanted = Wanted(prompt=random_tokens(130, seed=8), max_length=150)
    ours = EngineBench(model, draft_length=5, garbage=True).run(wanted)[0]
    assert len(ours.tokens) == 20
    assert torch.tensor(ours.logprobs).isfinite().all()
    assert abs(ours.logprobs[0] - alone(wanted).logprobs[0]) < 0.2
