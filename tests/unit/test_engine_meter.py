"""From steps to figures."""

from __future__ import annotations

from typing import Any, cast

import pytest

from common.engine.memory import Memory
from common.engine.meter import StepMeter, follow_engine
from common.engine.request import Request, RoundResult, StepReport
from common.kv_cache.layout import PAGE_TOKENS
from common.telemetry.metrics import WorkerMetrics
from tests.support.figures import figure

NOBODY = cast(Request, None)
"""A meter does not look at requests: they go on changing on the engine's thread."""


class Measured:
    """Metrics of a worker whose drafts are three tokens long, and the meter that fills them."""

    def __init__(self) -> None:
        self.metrics = WorkerMetrics(model="tiny", role="decode")
        self.meter = StepMeter(self.metrics, draft_length=3, wall_clock=lambda: 1234.5)

    def figure(self, name: str, **labels: str) -> float:
        return figure(self.metrics.registry, f"dspark_{name}", **labels)

    def positions(self, name: str) -> list[float]:
        name = f"spec_{name}_tokens_per_position_total"
        return [self.figure(name, position=position) for position in "123"]


@pytest.fixture
def it() -> Measured:
    return Measured()


def a_round(
    number: int,
    *,
    num_accepted: int = 0,
    confidences: tuple[float, ...] = (),
    num_offered: int | None = None,
    ends_prompt: bool = False,
) -> RoundResult:
    return RoundResult(
        request=NOBODY,
        round=number,
        base=10,
        token_ids=(7,) * (num_accepted + 1),
        num_draft=len(confidences),
        num_accepted=num_accepted,
        confidences=confidences,
        num_offered=len(confidences) if num_offered is None else num_offered,
        ends_prompt=ends_prompt,
    )


def a_step(*rounds: RoundResult, **facts: Any) -> StepReport:
    known: dict[str, Any] = {"progressed": (), "num_rows": 8, "seconds": 0.25, "phase_seconds": {}}
    return StepReport(rounds=rounds, **{**known, **facts})


def test_a_steps_time_is_told_as_a_whole_and_by_phase(it: Measured) -> None:
    phases = {"schedule": 0.01, "forward": 0.1, "verify": 0.02, "draft": 0.03, "copy": 0.04}
    it.meter.count(a_step(phase_seconds={**phases, "commit": 0.05}))
    assert it.figure("step_duration_seconds_sum") == 0.25
    by_phase = {
        phase: it.figure("step_phase_seconds_total", phase=phase)
        for phase in ("schedule", "verify", "sample", "draft", "copy", "commit")
    }
    assert list(by_phase.values()) == [0.01, 0.1, 0.02, 0.03, 0.04, 0.05]
    assert it.figure("last_step_timestamp_seconds") == 1234.5


def test_rows_requests_and_prompt_tokens_are_counted(it: Measured) -> None:
    it.meter.count(a_step(a_round(1), progressed=(NOBODY, NOBODY), num_prompt_tokens=6))
    assert it.figure("step_rows_sum") == 8
    assert it.figure("step_batch_size_sum") == 3
    assert it.figure("prompt_tokens_computed_total") == 6


def test_predicted_acceptance_is_the_chance_that_a_draft_and_all_before_it_are_accepted(
    it: Measured,
) -> None:
    it.meter.count(
        a_step(
            a_round(1, num_accepted=2, confidences=(0.5, 0.5, 0.5)),
            a_round(4, num_accepted=0, confidences=(0.8, 0.5)),
        )
    )
    assert it.positions("draft") == [2, 2, 1]
    assert it.positions("accepted") == [1, 1, 0]
    assert it.positions("predicted") == pytest.approx([0.5 + 0.8, 0.25 + 0.4, 0.125])
    assert it.figure("spec_drafts_total") == 2
    assert it.figure("spec_draft_tokens_total") == 5
    assert it.figure("spec_accepted_tokens_total") == 2


def test_accepted_lengths_are_told_apart_by_rounds_since_the_hand_off(it: Measured) -> None:
    numbers = (1, 2, 3, 4, 7, 8, 100)
    it.meter.count(a_step(*(a_round(n, num_accepted=1, confidences=(0.5,)) for n in numbers)))
    counts = {
        group: it.figure("spec_accepted_length_count", rounds_since_handoff=group)
        for group in ("1", "2", "3", "4-7", "8+")
    }
    assert counts == {"1": 1, "2": 1, "3": 1, "4-7": 2, "8+": 2}
    assert it.figure("spec_accepted_length_sum") == 14 == it.figure("tokens_sampled_total")


def test_the_token_that_ends_a_prompt_is_no_verification(it: Measured) -> None:
    it.meter.count(a_step(a_round(1, ends_prompt=True)))
    assert it.figure("tokens_sampled_total") == 1
    assert it.figure("spec_accepted_length_count") == 0
    assert it.figure("spec_draft_skipped_total") == 0


def test_a_round_without_drafts_says_why_and_cut_drafts_are_counted(it: Measured) -> None:
    it.meter.count(
        a_step(a_round(1), a_round(2, num_offered=3), a_round(3, confidences=(0.5,), num_offered=3))
    )
    assert it.figure("spec_draft_skipped_total", reason="no_proposal") == 1
    assert it.figure("spec_draft_skipped_total", reason="not_scheduled") == 1
    assert it.figure("spec_cut_tokens_total") == 5
    assert it.figure("spec_verify_window_tokens_sum") == 1 + 1 + 2


def test_engine_and_memory_are_looked_at_whenever_metrics_are_read(it: Measured) -> None:
    class Engine:
        has_crashed = False
        busy_s = 0.0

    engine, memory = Engine(), Memory(num_pages=8, num_slots=4)
    follow_engine(it.metrics.engine, engine, memory)
    assert it.figure("kv_cache_capacity_tokens") == 8 * PAGE_TOKENS
    assert it.figure("kv_cache_usage_ratio") == 0
    held = memory.reserve(2 * PAGE_TOKENS)
    engine.busy_s, engine.has_crashed = 3.5, True
    assert it.figure("kv_cache_used_tokens") == 2 * PAGE_TOKENS
    assert it.figure("kv_cache_usage_ratio") == 0.25
    assert it.figure("request_slots", state="used") == 1
    assert it.figure("request_slots", state="free") == 3
    assert it.figure("engine_busy_seconds") == 3.5
    assert it.figure("engine_failed") == 1
    held.release()
    assert it.figure("kv_cache_used_tokens") == 0
