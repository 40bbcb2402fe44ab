"""How much of the time a worker writes, and how fast."""

from __future__ import annotations

import pytest

from common.telemetry.metrics import WorkerMetrics
from services.prefill.link import LinkMeter
from tests.support.figures import figure


class It:
    def __init__(self) -> None:
        self.now = 0.0
        self.metrics = WorkerMetrics(model="tiny", role="prefill")
        self.link = LinkMeter(self.metrics.transfer, clock=lambda: self.now)

    def figure(self, name: str, **labels: str) -> float:
        return figure(self.metrics.registry, f"dspark_kv_{name}", **labels)


@pytest.fixture
def it() -> It:
    return It()


def test_time_in_which_two_writes_overlap_is_counted_once(it: It) -> None:
    with it.link.writing("nixl"):
        it.now = 1.0
        with it.link.writing("grpc"):
            it.now = 3.0
            assert it.figure("link_busy_seconds_total") == 1.0
        it.now = 4.0
    it.now = 10.0
    with it.link.writing("nixl"):
        it.now = 10.5
    assert it.figure("link_busy_seconds_total") == 4.5
    assert it.figure("transfer_duration_seconds_sum", engine="nixl") == 4.5
    assert it.figure("transfer_duration_seconds_sum", engine="grpc") == 2.0


def test_a_write_that_fails_took_its_time_but_moved_nothing(it: It) -> None:
    with pytest.raises(ConnectionError), it.link.writing("grpc"):
        it.now = 2.0
        raise ConnectionError
    assert it.figure("transfer_duration_seconds_sum", engine="grpc") == 2.0
    assert it.figure("transfer_bytes_total") == it.figure("link_bytes_per_second") == 0


def test_the_link_can_do_what_its_fastest_write_did(it: It) -> None:
    for seconds, num_bytes in ((1.0, 1000), (0.5, 2000), (2.0, 1000)):
        with it.link.writing("nixl") as writing:
            it.now += seconds
        it.link.wrote(writing, num_bytes)
    assert it.figure("link_bytes_per_second", engine="nixl") == 4000
    assert it.figure("link_bytes_per_second", engine="grpc") == 0
    assert it.figure("transfer_bytes_total", engine="nixl") == 4000
    assert it.figure("transfer_bytes_per_second_count", engine="nixl") == 3
