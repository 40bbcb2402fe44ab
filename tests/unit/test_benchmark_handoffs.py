"""What the benchmark's figures of hand-offs mean, on hand-offs whose times are made up."""

from __future__ import annotations

import pytest

from benchmarks.bare_nixl import ratio_figures
from benchmarks.by_hand import HandedOver
from benchmarks.overheads import overhead_figures, penalty_figures, share_figures
from dspark.v1.prefill_service_pb2 import HandoffDone
from services.cli.transfer_bench.patterns import Pattern


def handed_over(
    handoff_s: float = 0.010,
    wire_s: float = 0.002,
    *,
    admitted_s: float = 0.008,
    placed_s: float = 0.1,
    num_late_bytes: int = 0,
    digest_s: float = 0.0,
) -> HandedOver:
    done = HandoffDone(
        num_bytes=1000,
        num_late_bytes=num_late_bytes,
        handoff_s=handoff_s,
        wire_s=wire_s,
        total_wire_s=0.004,
        digest_s=digest_s,
    )
    return HandedOver(done=done, admitted_s=admitted_s, verified_s=0.02, placed_s=placed_s)


def test_only_the_wire_time_behind_the_first_token_is_taken_off_each_handoff() -> None:
    figures = overhead_figures(
        [handed_over(0.010, 0.002), handed_over(0.020, 0.0), handed_over(0.050, 0.040)]
    )
    assert figures["transfer.handoff.duration.p50_s"] == pytest.approx(0.020)
    assert figures["transfer.handoff.beyond_wire.p50_s"] == pytest.approx(0.010)
    assert figures["transfer.handoff.beyond_wire.p99_s"] == pytest.approx(0.0198)
    assert figures["transfer.handoff.wire.p50_s"] == pytest.approx(0.004)


def test_a_request_that_ran_before_its_first_token_was_heard_of_has_not_waited() -> None:
    figures = overhead_figures([handed_over(admitted_s=-0.003), handed_over(admitted_s=-0.001)])
    assert figures["transfer.handoff.request_beyond_wire.p99_s"] == 0.0


def test_shares_are_of_each_handoffs_own_bytes_and_wire() -> None:
    figures = share_figures(
        "x", [handed_over(num_late_bytes=100, digest_s=0.0001), handed_over(num_late_bytes=300)]
    )
    assert figures["transfer.x.late_share_mean"] == pytest.approx(0.2)
    assert figures["transfer.x.late_share_max"] == pytest.approx(0.3)
    assert figures["transfer.x.digest_over_wire_p50"] == pytest.approx(0.0125)


def test_the_penalty_of_a_cold_pair_is_beyond_what_a_met_pair_usually_takes() -> None:
    warm = [handed_over(placed_s=s) for s in (0.09, 0.10, 0.50)]
    cold = [handed_over(placed_s=s) for s in (0.12, 0.13, 0.15)]
    figures = penalty_figures(cold, warm)
    assert figures["transfer.cold_pair.met_p50_s"] == pytest.approx(0.10)
    assert figures["transfer.cold_pair.penalty_p50_s"] == pytest.approx(0.03)
    assert figures["transfer.cold_pair.penalty_max_s"] == pytest.approx(0.05)


def test_an_engine_is_compared_with_bare_nixl_pattern_by_pattern() -> None:
    few, many = (Pattern(size_bytes=4 << 20, num_ranges=count) for count in (1, 1024))
    figures = ratio_figures(
        {
            (few, "engine"): 0.002,
            (few, "posting"): 0.0001,
            (few, "bare"): 0.001,
            (many, "engine"): 0.004,
            (many, "bare"): 0.004,
        }
    )
    assert figures["nixl.4MiB.1_range.over_bare"] == pytest.approx(0.5)
    assert figures["nixl.4MiB.1_range.posting_share"] == pytest.approx(0.05)
    assert figures["nixl.4MiB.1024_ranges.over_bare"] == pytest.approx(1.0)
    assert figures["nixl.4MiB.1_range.bare_bytes_per_s"] == pytest.approx((4 << 20) / 0.001)
