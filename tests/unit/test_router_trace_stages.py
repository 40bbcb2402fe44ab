"""Stages of a request: one after the other, none twice at a time, and together the whole."""

from __future__ import annotations

import itertools

import pytest

from services.router.commits import Round
from services.router.events import Admitted, Event, FirstToken, HandedOff
from services.router.trace_stages import Stage, TraceStages

FIRST_TOKEN = FirstToken(token_id=5, logprob=None, queue_s=0.0, compute_s=0.0)
HANDED_OFF = HandedOff(lease_id="l", lease_s=30.0)
ADMITTED = Admitted(
    first_token_id=5, first_logprob=None, drafter_fallback="", transfer_engine="grpc"
)
ROUND = Round(epoch=0, number=1, base=9, token_ids=(1, 2), num_draft=7, num_accepted=1)


class Walk:
    """A request whose every step takes one second."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stages = TraceStages(self._clock, began=self.now)

    def _clock(self) -> float:
        self.now += 1.0
        return self.now

    def begin(self, *, is_from_lease: bool = False) -> None:
        self.stages.enter(Stage.QUEUE)
        self.stages.enter(Stage.RESERVE)
        self.stages.placed(is_from_lease=is_from_lease)

    def see(self, *events: Event, has_handoff: bool = True) -> None:
        for event in events:
            self.stages.saw(event, has_handoff=has_handoff)

    def end(self) -> list[str]:
        self.stages.enter(Stage.FINISH)
        self.stages.end()
        passed = self.stages.passed
        assert passed[0].began == 100.0
        assert all(a.ended == b.began for a, b in itertools.pairwise(passed))
        assert sum(each.ended - each.began for each in passed) == self.now - 100.0
        return [each.stage.value for each in passed]


START = ["tokenize", "queue", "reserve"]
HANDOFF = ["prefill", "kv_transfer", "decode_wait", "decode", "finish"]


@pytest.mark.parametrize(
    "events",
    [
        [FIRST_TOKEN, HANDED_OFF, ADMITTED, ROUND, ROUND],
        [FIRST_TOKEN, ADMITTED, HANDED_OFF, ROUND],
        # Decode may be the first to tell of the first token.
        [ADMITTED, FIRST_TOKEN, ROUND, HANDED_OFF],
    ],
)
def test_a_handed_over_request_passes_all_stages_whoever_reports_first(events: list[Event]) -> None:
    walk = Walk()
    walk.begin()
    walk.see(*events)
    assert walk.end() == START + HANDOFF


def test_a_prompt_that_decode_computes_ends_with_the_first_round() -> None:
    walk = Walk()
    walk.begin()
    walk.see(ADMITTED, ROUND, has_handoff=False)
    assert walk.end() == [*START, "prefill", "decode", "finish"]


def test_one_token_needs_no_hand_off() -> None:
    walk = Walk()
    walk.begin()
    walk.see(FIRST_TOKEN)
    assert walk.end() == [*START, "prefill", "kv_transfer", "finish"]


def test_a_request_that_is_placed_again_goes_through_them_again() -> None:
    walk = Walk()
    walk.begin()
    walk.see(FIRST_TOKEN, ADMITTED, ROUND)
    walk.begin()
    walk.see(FIRST_TOKEN, ADMITTED, ROUND)
    assert walk.end() == [*START, *HANDOFF[:-1], "queue", "reserve", *HANDOFF]


def test_state_from_a_lease_is_handed_over_without_a_prefill() -> None:
    walk = Walk()
    walk.begin(is_from_lease=True)
    walk.see(ADMITTED, ROUND)
    assert walk.end() == START + HANDOFF[1:]
