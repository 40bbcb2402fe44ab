"""What is declared: names, labels, first values, the page that is written from them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from common.claims import Claim, MemoryKind, RankMemory
from common.telemetry.metrics import RouterMetrics, WorkerMetrics
from common.telemetry.metrics.families import Family
from common.telemetry.metrics.router import CODES, STAGES, error_reasons
from common.telemetry.metrics.transfer import FAILURE_REASONS, TRANSFER_ENGINES
from common.telemetry.metrics.vllm import ALIASES
from tests.support.figures import figure
from tools import metrics_page

GOLDEN = Path(__file__).with_name("metric_families.txt")
MAX_FAMILIES = 60
"""Of one process: whoever scrapes and stores them pays for every one."""


def router() -> RouterMetrics:
    return RouterMetrics(model="tiny")


def worker(role: str = "decode", draft_length: int = 5) -> WorkerMetrics:
    metrics = WorkerMetrics(model="tiny", role=role)
    metrics.spec_decode.know_draft_length(draft_length)
    return metrics


def exposed_labels(registry: CollectorRegistry) -> dict[str, set[tuple[str, ...]]]:
    """The label names of every sample, by its name."""
    labels: dict[str, set[tuple[str, ...]]] = {}
    for metric in registry.collect():
        for sample in metric.samples:
            labels.setdefault(sample.name, set()).add(tuple(sample.labels))
    return labels


def described(families: tuple[Family, ...]) -> list[str]:
    return [f"{f.name} {f.kind} {' '.join(f.labels)}" for f in families]


def test_no_family_vanishes_or_changes_its_labels_unnoticed() -> None:
    """Dashboards, alerts and autoscalers of others stand on these: whoever changes the list tells them."""
    now = sorted({*described(router().families), *described(worker().families)})
    assert now == GOLDEN.read_text().splitlines()


def test_both_roles_have_the_same_families_with_the_same_labels() -> None:
    assert exposed_labels(worker("prefill").registry) == exposed_labels(worker("decode").registry)


def test_a_process_has_few_enough_families() -> None:
    assert len(router().families) < MAX_FAMILIES
    assert len(worker().families) < MAX_FAMILIES


def test_everything_whose_labels_are_known_beforehand_is_there_at_zero() -> None:
    opened_later = {
        *("dspark_build_info", "dspark_config_info"),
        *("dspark_kv_transport_info", "dspark_kv_digest_mismatches_total"),
        *("dspark_router_worker_selections_total", "dspark_router_ejections_total"),
    }
    for metrics in (router(), worker()):
        for family in metrics.families:
            sample = family.name + ("_count" if family.kind == "histogram" else "")
            if family.name not in opened_later:
                assert figure(metrics.registry, sample) == 0, family.name


def test_every_combination_of_known_labels_is_there() -> None:
    registry = worker().registry
    for engine in TRANSFER_ENGINES:
        assert figure(registry, "dspark_kv_transfer_bytes_total", engine=engine) == 0
    for reason in FAILURE_REASONS:
        assert figure(registry, "dspark_kv_transfer_failures_total", reason=reason) == 0
    for position in "12345":
        name = "dspark_spec_accepted_tokens_per_position_total"
        assert figure(registry, name, position=position) == 0
    registry = router().registry
    for code in CODES:
        assert figure(registry, "dspark_requests_total", endpoint="Generate", code=code) == 0
    for reason in error_reasons():
        assert figure(registry, "dspark_request_errors_total", reason=reason) == 0
    for stage in STAGES:
        name = "dspark_request_stage_duration_seconds_count"
        assert figure(registry, name, stage=stage) == 0
    for role in ("prefill", "decode"):
        assert figure(registry, "dspark_workers", role=role, state="ready") == 0


def test_every_name_has_the_projects_prefix_and_a_sentence() -> None:
    for metrics in (router(), worker()):
        for family in metrics.families:
            assert family.name.startswith("dspark_"), family.name
            assert family.help.endswith("."), family.name


def test_a_counter_has_no_time_of_creation_beside_it() -> None:
    names = exposed_labels(worker().registry)
    assert not [name for name in names if name.startswith("dspark_") and name.endswith("_created")]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("kind", ["router", "worker"])
def test_promtool_has_no_complaint(kind: str) -> None:
    registry = router().registry if kind == "router" else worker().registry
    found = subprocess.run(
        ["promtool", "check", "metrics"],
        input=generate_latest(registry),
        capture_output=True,
        timeout=30,
        check=False,
    )
    # The Python client's own names are not ours to judge.
    complaints = [
        line
        for line in (found.stdout + found.stderr).decode().splitlines()
        if line and not line.startswith(("python_", "process_"))
    ]
    assert complaints == []


def test_a_peer_has_one_engine_at_a_time_and_none_when_it_is_forgotten() -> None:
    metrics = worker()

    def engines(peer: str) -> list[str]:
        return [
            sample.labels["engine"]
            for metric in metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "dspark_kv_transport_info" and sample.labels["peer"] == peer
        ]

    transfer = metrics.transfer
    transfer.chose_engine(peer="a:1", engine="grpc", reason="no nixl")
    transfer.chose_engine(peer="b:1", engine="grpc", reason="configured")
    transfer.chose_engine(peer="a:1", engine="nixl", reason="configured")
    assert (engines("a:1"), engines("b:1")) == (["nixl"], ["grpc"])
    transfer.forget_peer("a:1")
    assert engines("a:1") == []


def test_a_setting_has_one_value_at_a_time() -> None:
    metrics = worker()
    metrics.process.describe_config({"num_pages": 8, "num_slots": 2})
    metrics.process.describe_config({"num_pages": 16})
    assert figure(metrics.registry, "dspark_config_info", setting="num_pages") == 1
    assert figure(metrics.registry, "dspark_config_info", setting="num_pages", value="16") == 1
    assert figure(metrics.registry, "dspark_config_info", setting="num_slots", value="2") == 1


def test_loaded_bytes_are_counted_once_however_often_progress_is_told() -> None:
    metrics = worker()
    for done in (10, 10, 40, 100):
        metrics.process.loading(done, 100)
    assert figure(metrics.registry, "dspark_weight_load_bytes_total") == 100
    assert figure(metrics.registry, "dspark_weight_load_progress_ratio") == 1


def test_device_memory_has_a_figure_for_every_kind_and_rank() -> None:
    metrics = worker()
    name = "dspark_device_memory_bytes"
    assert figure(metrics.registry, name, rank="0", kind="host") == 0
    weights = Claim(owner="target", kind=MemoryKind.WEIGHTS, num_bytes=100)
    drafter = Claim(owner="drafter", kind=MemoryKind.WEIGHTS, num_bytes=20)
    rows = Claim(owner="window", kind=MemoryKind.RINGS, num_bytes=7)
    metrics.engine.set_device_memory(
        [
            RankMemory(rank=0, device="cuda:0", claims=(weights, drafter)),
            RankMemory(rank=1, device="cuda:1", claims=(weights, rows)),
        ]
    )
    assert figure(metrics.registry, name, rank="0", kind="weights") == 120
    assert figure(metrics.registry, name, rank="0", kind="rings") == 0
    assert figure(metrics.registry, name, rank="1", kind="weights") == 100
    assert figure(metrics.registry, name, rank="1", kind="rings") == 7
    assert figure(metrics.registry, name, kind="weights") == 220


def test_two_processes_worth_of_metrics_do_not_meet() -> None:
    one, other = worker(), worker()
    one.transfer.leases.set(3)
    assert figure(other.registry, "dspark_kv_leases") == 0


def test_the_page_is_what_the_declarations_give() -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "run `make metrics-page`"


class TestVllmsNames:
    def test_are_there_only_when_asked_for(self) -> None:
        assert not [name for name in exposed_labels(worker().registry) if ":" in name]

    def test_stand_for_our_figures(self) -> None:
        metrics = WorkerMetrics(model="tiny", role="decode", compat="vllm")
        metrics.spec_decode.know_draft_length(2)
        metrics.engine.running_requests.set(3)
        metrics.spec_decode.accepted_tokens_per_position.labels(position="1").inc(5)
        registry = metrics.registry
        labels = {"model_name": "tiny", "engine": "0"}
        assert registry.get_sample_value("vllm:num_requests_running", labels) == 3
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert registry.get_sample_value(name, {**labels, "position": "0"}) == 5
        assert registry.get_sample_value(name, {**labels, "position": "1"}) == 0

    def test_count_only_requests_that_ended_well_as_successes(self) -> None:
        metrics = RouterMetrics(model="tiny", compat="vllm")
        for reason in ("stop", "stop", "length", "error", "cancelled"):
            metrics.requests.finished.labels(reason=reason).inc()
        name = "vllm:request_success_total"
        assert figure(metrics.registry, name) == 3
        assert figure(metrics.registry, name, finished_reason="stop") == 2

    def test_have_the_buckets_of_ours(self) -> None:
        metrics = RouterMetrics(model="tiny", compat="vllm")
        metrics.requests.time_to_first_token.observe(0.05)
        name = "time_to_first_token_seconds"
        for ending in ("_bucket", "_count", "_sum"):
            ours = figure(metrics.registry, f"dspark_{name}{ending}")
            assert figure(metrics.registry, f"vllm:{name}{ending}") == ours > 0

    def test_are_all_about_families_that_exist(self) -> None:
        known = {family.name for m in (router(), worker()) for family in m.families}
        assert set(ALIASES.values()) <= known

    def test_can_be_asked_for_by_name(self) -> None:
        metrics = WorkerMetrics(model="tiny", role="decode", compat="vllm")
        only = metrics.registry.restricted_registry(["vllm:num_requests_waiting"])
        assert [metric.name for metric in only.collect()] == ["vllm:num_requests_waiting"]
