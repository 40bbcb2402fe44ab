"""Names, labels and first values of the metrics."""

from __future__ import annotations

from common.telemetry.metrics import FAILURE_REASONS, TRANSFER_ENGINES, TransferMetrics


def test_what_can_be_counted_is_there_at_zero() -> None:
    value = TransferMetrics().registry.get_sample_value
    for engine in TRANSFER_ENGINES:
        assert value("dspark_kv_transfer_bytes_total", {"engine": engine}) == 0
        assert value("dspark_kv_transfer_duration_seconds_count", {"engine": engine}) == 0
        assert value("dspark_kv_transport_fallbacks_total", {"wanted": engine}) == 0
    for reason in FAILURE_REASONS:
        assert value("dspark_kv_transfer_failures_total", {"reason": reason}) == 0
    assert value("dspark_kv_leases") == 0
    assert value("dspark_kv_quarantined_pages") == 0


def test_every_name_has_the_projects_prefix_and_a_sentence() -> None:
    for family in TransferMetrics().registry.collect():
        if not family.name.startswith(("process_", "python_")):
            assert family.name.startswith("dspark_kv_"), family.name
            assert family.documentation.endswith("."), family.name


def test_a_peer_has_one_engine_at_a_time_and_none_when_it_is_forgotten() -> None:
    metrics = TransferMetrics()

    def engines(peer: str) -> list[str]:
        return [
            sample.labels["engine"]
            for family in metrics.registry.collect()
            for sample in family.samples
            if sample.name == "dspark_kv_transport_info" and sample.labels["peer"] == peer
        ]

    metrics.chose_engine(peer="a:1", engine="grpc", reason="no nixl")
    metrics.chose_engine(peer="b:1", engine="grpc", reason="configured")
    metrics.chose_engine(peer="a:1", engine="nixl", reason="configured")
    assert (engines("a:1"), engines("b:1")) == (["nixl"], ["grpc"])
    metrics.forget_peer("a:1")
    assert engines("a:1") == []


def test_two_processes_worth_of_metrics_do_not_meet() -> None:
    one, other = TransferMetrics(), TransferMetrics()
    one.leases.set(3)
    assert other.registry.get_sample_value("dspark_kv_leases") == 0
