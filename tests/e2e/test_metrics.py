"""Requests through the three real services, and what each of them says of it over HTTP.

Others have shipped workers whose figures were always zero behind a router, or whose labels differed between the roles: what
should have moved is therefore everything but what is named here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import dspark
from common.telemetry.metrics import RouterMetrics, WorkerMetrics
from common.telemetry.metrics.router import FIRST_TOKEN_STAGES, STAGES
from tests.support.asking import Answer, Ask, ask_all, exactly
from tests.support.questions import Question
from tests.support.scrape import Scrape
from tests.support.system import EventLoop, System, SystemOptions

pytestmark = pytest.mark.e2e

ROLES = ("router", "prefill", "decode")
NUM_TOKENS = 24

AT_REST = {
    # These are zero again once nothing runs; other tests look at them meanwhile.
    *("dspark_requests_in_flight", "dspark_router_queue_requests"),
    *("dspark_role_queued_requests", "dspark_role_queued_tokens", "dspark_role_running_requests"),
    *("dspark_role_running_tokens", "dspark_role_reserved_pages", "dspark_role_waiting_seconds"),
    *("dspark_queue_requests", "dspark_running_requests", "dspark_queue_uncached_tokens"),
    *("dspark_kv_cache_used_tokens", "dspark_kv_cache_usage_ratio", "dspark_request_slots"),
    *("dspark_reservations", "dspark_engine_busy_seconds", "dspark_kv_handoffs_in_progress"),
    *("dspark_kv_leases", "dspark_router_expected_wait_seconds"),
}
FROM_THE_START = {
    # Set before the first request came.
    *("dspark_build_info", "dspark_config_info", "dspark_startup_duration_seconds"),
    *("dspark_weight_load_bytes_total", "dspark_weight_load_progress_ratio"),
    *("dspark_kv_cache_capacity_tokens", "dspark_device_memory_bytes", "dspark_workers"),
    *("dspark_role_capacity_pages", "dspark_kv_transport_info", "dspark_kv_pair_meetings_total"),
}
NEEDS_A_FAULT = {
    *("dspark_router_retries_total", "dspark_router_ejections_total"),
    *("dspark_engine_failed", "dspark_reservations_expired_total", "dspark_kv_refusals_total"),
    *("dspark_spec_drafter_fallbacks_total", "dspark_kv_transfer_failures_total"),
    *("dspark_kv_digest_mismatches_total", "dspark_kv_transport_fallbacks_total"),
    *("dspark_kv_quarantined_pages", "dspark_kv_lease_handoffs_total"),
    # Whether a draft is cut, and whether a run ahead is lost, is up to the load.
    *("dspark_spec_cut_tokens_total", "dspark_tokens_discarded_total"),
    *("dspark_spec_draft_skipped_total",),
}
OF_DECODE = {
    *("dspark_spec_drafts_total", "dspark_spec_draft_tokens_total"),
    *("dspark_spec_accepted_tokens_total", "dspark_spec_draft_tokens_per_position_total"),
    *("dspark_spec_accepted_tokens_per_position_total",),
    *("dspark_spec_predicted_tokens_per_position_total", "dspark_spec_accepted_length"),
    *("dspark_spec_verify_window_tokens", "dspark_kv_received_bytes_total"),
    *("dspark_kv_receive_duration_seconds",),
}
OF_PREFILL = {
    *("dspark_prompt_tokens_computed_total", "dspark_kv_transfer_duration_seconds"),
    *("dspark_kv_transfer_bytes_total", "dspark_kv_transfer_bytes_per_second"),
    *("dspark_kv_link_busy_seconds_total", "dspark_kv_handoff_duration_seconds"),
    *("dspark_kv_handoff_tail_ratio", "dspark_kv_leases_ended_total"),
    *("dspark_kv_link_bytes_per_second", "dspark_kv_handoff_overhead_seconds"),
}
QUIET = {
    "router": AT_REST | FROM_THE_START | NEEDS_A_FAULT,
    "prefill": AT_REST | FROM_THE_START | NEEDS_A_FAULT | OF_DECODE,
    "decode": AT_REST | FROM_THE_START | NEEDS_A_FAULT | OF_PREFILL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Scrapes of all processes around a few requests and one that is refused."""

    before: dict[str, Scrape]
    after: dict[str, Scrape]
    answers: list[Answer]


@pytest.fixture(scope="module")
def observed(
    servers: EventLoop, shipped_checkpoint: Path, questions: tuple[Question, ...]
) -> Iterator[Observed]:
    options = SystemOptions(checkpoint_dir=shipped_checkpoint, serves_metrics=True, is_patient=True)
    with System(servers, options).running() as system:
        longest = sorted(questions, key=lambda question: len(question.token_ids))[-3:]
        before = scrape_all(system)
        asks = [Ask(prompt=q.token_ids, stop=exactly(NUM_TOKENS)) for q in longest]
        answers = ask_all(system.address, asks)
        with dspark.Client(system.address) as client, pytest.raises(dspark.BadRequestError):
            client.generate((1, 10**6), stop=exactly(1))
        system.wait_at_rest()
        yield Observed(before=before, after=scrape_all(system), answers=answers)


def scrape_all(system: System) -> dict[str, Scrape]:
    return {role: Scrape.of(system.admin_ports[role]) for role in ROLES}


def families_of(role: str) -> set[str]:
    metrics = RouterMetrics(model="") if role == "router" else WorkerMetrics(model="", role=role)
    return {family.name for family in metrics.families}


@pytest.mark.parametrize("role", ROLES)
def test_every_family_that_should_have_moved_has_moved(observed: Observed, role: str) -> None:
    before, after = observed.before[role], observed.after[role]
    expected = families_of(role) - QUIET[role]
    assert not sorted(name for name in expected if not after.has_moved(name, before))


@pytest.mark.parametrize("role", ROLES)
def test_what_is_said_once_is_said_before_the_first_request(observed: Observed, role: str) -> None:
    """A router has no weights; prefill workers meet decode workers, which are met."""
    missing = {
        "router": {"dspark_weight_load_bytes_total", "dspark_weight_load_progress_ratio"},
        "prefill": set[str](),
        "decode": {"dspark_kv_pair_meetings_total"},
    }
    said = (FROM_THE_START & families_of(role)) - missing[role]
    assert all(observed.after[role].total(name) > 0 for name in said)


def test_the_roles_tell_of_themselves_with_the_same_labels(observed: Observed) -> None:
    def label_sets(role: str) -> set[tuple[str, tuple[str, ...]]]:
        return {
            (name, tuple(label for label, _ in labels))
            for name, labels in observed.after[role].samples
            if name.startswith("dspark_") and name not in of_one_side
        }

    # Only a receiver knows of digests, by peers that it met.
    of_one_side = {"dspark_kv_digest_mismatches_total"}
    assert label_sets("prefill") == label_sets("decode")


def test_stages_add_up_to_the_time_to_first_token_and_to_the_duration(observed: Observed) -> None:
    router = observed.after["router"]
    name = "dspark_request_stage_duration_seconds"
    stages = router.by("stage", f"{name}_sum")
    first_token_s = router.total("dspark_time_to_first_token_seconds_sum")
    duration_s = router.total("dspark_request_duration_seconds_sum")
    assert set(stages) == set(STAGES)
    assert sum(stages[stage] for stage in FIRST_TOKEN_STAGES) == pytest.approx(first_token_s)
    assert sum(stages.values()) == pytest.approx(duration_s)
    assert set(router.by("stage", f"{name}_count").values()) == {len(observed.answers)}
    assert all(stages[stage] > 0 for stage in ("tokenize", "queue", "prefill", "decode"))


def test_the_router_and_its_clients_agree_on_times(observed: Observed) -> None:
    """Both are taken by the router's clock, the client's a moment before its request has left the workers."""
    timings = [answer.completion.timings for answer in observed.answers]
    router = observed.after["router"]
    duration_s = router.total("dspark_request_duration_seconds_sum")
    assert sum(timing.total_s for timing in timings) <= duration_s
    first_token_s = router.total("dspark_time_to_first_token_seconds_sum")
    assert first_token_s <= duration_s


def test_tokens_are_counted_alike_everywhere(observed: Observed) -> None:
    """What was sampled is what was delivered and what was discarded; what rounds brought is what decode sampled."""
    router, prefill, decode = (observed.after[role] for role in ROLES)
    delivered = sum(len(answer.token_ids) for answer in observed.answers)
    sampled = (
        prefill.total("dspark_tokens_sampled_total"),
        decode.total("dspark_tokens_sampled_total"),
    )
    discarded = sum(w.total("dspark_tokens_discarded_total") for w in (prefill, decode))
    assert router.total("dspark_generation_tokens_total") == delivered
    assert sum(sampled) - discarded == delivered
    assert sampled[0] == len(observed.answers)
    assert decode.total("dspark_spec_accepted_length_sum") == sampled[1]
    prompts = sum(answer.completion.usage.prompt_tokens for answer in observed.answers)
    assert router.total("dspark_prompt_tokens_total") == prompts
    assert prefill.total("dspark_prompt_tokens_computed_total") == prompts


def test_accepted_drafts_add_up_over_positions_and_rounds(observed: Observed) -> None:
    decode = observed.after["decode"]
    accepted = decode.total("dspark_spec_accepted_tokens_total")
    verified = decode.by("position", "dspark_spec_draft_tokens_per_position_total")
    by_position = decode.by("position", "dspark_spec_accepted_tokens_per_position_total")
    predicted = decode.by("position", "dspark_spec_predicted_tokens_per_position_total")
    num_rounds = decode.total("dspark_spec_accepted_length_count")
    assert decode.total("dspark_spec_accepted_length_sum") == num_rounds + accepted
    assert sum(by_position.values()) == accepted
    assert sum(verified.values()) == decode.total("dspark_spec_draft_tokens_total")
    in_order = [by_position[position] for position in sorted(by_position, key=int)]
    assert in_order == sorted(in_order, reverse=True)
    assert all(0 <= predicted[position] <= verified[position] for position in verified)
    first_rounds = decode.by("rounds_since_handoff", "dspark_spec_accepted_length_count")
    assert first_rounds["1"] == first_rounds["2"] == len(observed.answers)


def test_bytes_that_left_are_bytes_that_arrived(observed: Observed) -> None:
    prefill, decode = observed.after["prefill"], observed.after["decode"]
    sent = prefill.by("engine", "dspark_kv_transfer_bytes_total")
    assert sent == decode.by("engine", "dspark_kv_received_bytes_total")
    engines = {answer.completion.route.transfer_engine for answer in observed.answers}
    assert {engine for engine, num_bytes in sent.items() if num_bytes} == engines
    assert decode.total("dspark_kv_transfer_bytes_total") == 0


def test_every_request_is_counted_where_it_passed(observed: Observed) -> None:
    router, prefill, decode = (observed.after[role] for role in ROLES)
    num_requests = len(observed.answers)
    assert router.by("code", "dspark_requests_total")["ok"] == num_requests
    assert router.by("reason", "dspark_request_finished_total") == {
        **dict.fromkeys(("stop", "abort", "error", "cancelled"), 0),
        "length": num_requests,
    }
    assert router.by("source", "dspark_router_placements_total")["prefill"] == num_requests
    assert router.by("role", "dspark_router_worker_selections_total") == {
        "prefill": num_requests,
        "decode": num_requests,
    }
    for worker in (prefill, decode):
        assert worker.total("dspark_queue_duration_seconds_count") == num_requests


def test_a_refused_request_is_counted_with_its_reason_and_takes_part_in_nothing_else(
    observed: Observed,
) -> None:
    router = observed.after["router"]
    errors = router.by("reason", "dspark_request_errors_total")
    assert {reason: count for reason, count in errors.items() if count} == {"INVALID_PARAMETER": 1}
    assert router.by("code", "dspark_requests_total")["invalid_argument"] == 1
    assert router.total("dspark_request_prompt_tokens_count") == len(observed.answers)
