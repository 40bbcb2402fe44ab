"""The engine gives a request that moved from another engine the same tokens, drafts and acceptance as if it had stayed."""

from __future__ import annotations

import dataclasses

import pytest

from common.engine.request import Request, Role
from common.types import SamplingParams, Verification
from tests.support.engine_bench import (
    GREEDY,
    EngineBench,
    Generated,
    Wanted,
    copy_state,
    moved_request,
    random_tokens,
)
from tests.support.small_engine import MODEL, SEEDED, TARGET_ONLY, alone


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
    return destination.adopt(moved_request(request, slot, with_drafter=with_drafter))


def moved_and_stayed(wanted: Wanted, *, with_drafter: bool = True) -> tuple[Generated, Generated]:
    """What a request gives behind its first token where it moved to, and all that it gives where it stays."""
    prefill, decode = (EngineBench(MODEL, draft_length=5, garbage=g) for g in (False, True))
    request = prefill.add(wanted)
    prefill.drain()
    moved = hand_off(prefill, request, decode, with_drafter=with_drafter)
    decode.drain()
    stayed = alone(dataclasses.replace(wanted, role=Role.GENERATE))
    return decode.generated[moved.request_id], stayed


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
    output, stayed = moved_and_stayed(wanted)
    ours, theirs = output.rounds, stayed.rounds[1:]
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
    output, stayed = moved_and_stayed(wanted, with_drafter=False)
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
