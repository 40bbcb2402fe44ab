"""Metrics as Prometheus and people ask for them."""

from __future__ import annotations

import gzip
import urllib.request
from collections.abc import Callable, Iterable, Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as plain_text

from common.telemetry.admin import AdminServer
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.probes import Probes
from services.cli.ports import free_ports

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def metrics() -> WorkerMetrics:
    metrics = WorkerMetrics(model="tiny", role="decode", compat="vllm")
    metrics.engine.running_requests.set(3)
    metrics.engine.step_duration.observe(0.25)
    return metrics


@pytest.fixture
def address(metrics: WorkerMetrics) -> Iterator[str]:
    (port,) = free_ports("127.0.0.1", 1)
    admin = AdminServer(metrics.registry, Probes(), host="127.0.0.1", port=port)
    yield f"http://127.0.0.1:{port}/metrics"
    admin.close()


def ask(address: str, **headers: str) -> tuple[str, bytes]:
    """Content type and body."""
    request = urllib.request.Request(address, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read()


def test_plain_text_is_what_comes_unasked(address: str, metrics: WorkerMetrics) -> None:
    content_type, body = ask(address)
    assert content_type.startswith("text/plain")
    names = {family.name for family in plain_text(body.decode())}
    # The parser drops the ending of counters.
    assert {family.name.removesuffix("_total") for family in metrics.families} <= names


def test_open_metrics_comes_when_it_is_asked_for(address: str, metrics: WorkerMetrics) -> None:
    content_type, body = ask(address, Accept=OPEN_METRICS)
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    parse: Callable[[str], Iterable[Metric]] = openmetrics_parser.text_string_to_metric_families
    names = {family.name for family in parse(body.decode())}
    assert {family.name.removesuffix("_total") for family in metrics.families} <= names


def test_an_exemplar_names_the_trace_of_an_observation(
    address: str, metrics: WorkerMetrics
) -> None:
    metrics.engine.step_duration.observe(0.3, exemplar={"trace_id": "abc"})
    _, body = ask(address, Accept=OPEN_METRICS)
    assert b'# {trace_id="abc"} 0.3' in body


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("dspark_running_requests", b"dspark_running_requests{"),
        ("dspark_spec_drafts_total", b"dspark_spec_drafts_total{"),
        ("dspark_step_duration_seconds_count", b"dspark_step_duration_seconds_count{"),
        ("vllm:num_requests_running", b"vllm:num_requests_running{"),
        ("process_resident_memory_bytes", b"process_resident_memory_bytes "),
    ],
)
@pytest.mark.parametrize("accept", ["text/plain", OPEN_METRICS])
def test_a_name_filters(address: str, name: str, sample: bytes, accept: str) -> None:
    """Asked for by name, a server of multiprocess metrics has answered with nothing, or with everything."""
    _, body = ask(f"{address}?name[]={name}", Accept=accept)
    lines = [line for line in body.splitlines() if not line.startswith(b"#")]
    assert lines
    assert all(line.startswith(sample) for line in lines)


def test_two_names_give_both_and_an_unknown_one_gives_nothing(address: str) -> None:
    _, body = ask(f"{address}?name[]=dspark_running_requests&name[]=dspark_queue_requests")
    assert {family.name for family in plain_text(body.decode())} == {
        "dspark_running_requests",
        "dspark_queue_requests",
    }
    assert ask(f"{address}?name[]=dspark_unheard_of")[1].strip() == b""


def test_an_answer_is_compressed_when_it_may_be(address: str) -> None:
    headers = {"Accept-Encoding": "gzip"}
    _, body = ask(address, **headers)
    assert b"dspark_running_requests" in gzip.decompress(body)
