"""The engine gives a request the same tokens with drafts of any length as without, to its last position."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from common.engine.request import Draft
from common.types import Proposal, SamplingParams
from tests.support.engine_bench import GREEDY, EngineBench, Wanted, random_tokens, small_model
from tests.support.small_engine import MODEL, SEEDED, TARGET_ONLY, alone


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


def test_a_bfloat16_engine_speculates_close_to_the_float32_one() -> None:
    model = small_model(drafter=True, dtype=torch.bfloat16)
    wanted = Wanted(prompt=random_tokens(130, seed=8), max_length=150)
    ours = EngineBench(model, draft_length=5, garbage=True).run(wanted)[0]
    assert len(ours.tokens) == 20
    assert torch.tensor(ours.logprobs).isfinite().all()
    assert abs(ours.logprobs[0] - alone(wanted).logprobs[0]) < 0.2
