"""Spans: what is recorded, what is carried on, and that nothing happens where nothing is traced."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from common.errors import ConfigError, QueueFull
from common.rpc.tracing import client_interceptors, server_interceptors, traceparent_of
from common.telemetry import tracing
from common.telemetry.logging import configure_logging
from common.telemetry.tracing import OFF, TracingConfig, open_tracing
from tests.support.spans import Kept

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_where_nothing_is_traced_nothing_is_imported_intercepted_or_made() -> None:
    assert open_tracing(TracingConfig(), role="router", version="1") is OFF
    assert OFF.begin("x") is OFF.join("x", traceparent=f"00-{TRACE}-{SPAN}-01") is None
    assert (server_interceptors(OFF), client_interceptors(OFF)) == ((), ())
    with tracing.part("x"), tracing.under(None):
        assert tracing.current() is None
        tracing.record("y", began=1.0, ended=2.0)
    code = (
        "import sys, services.router, common.rpc.server, common.rpc.tracing; "
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_packages_an_endpoint_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "common.telemetry.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"pip install 'dspark-serving\[tracing\]'"):
        open_tracing(TracingConfig(endpoint="http://127.0.0.1:1"), role="router", version="1")


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"sample_ratio": 1.5}, "sample_ratio is 1.5"),
        ({"sample_ratio": -0.1}, "sample_ratio is -0.1"),
        ({"endpoint": "collector:4317"}, "give a URL such as http://collector:4317"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(values: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        TracingConfig(**values)


def test_a_span_and_its_parts_have_the_times_that_they_are_given() -> None:
    kept = Kept()
    span = kept.tracing("router").begin("request", began=10.0)
    assert span is not None
    with tracing.under(span):
        tracing.record("queue", began=10.0, ended=10.5, attributes={"n": 3, "empty": ""})
    span.end(ended=11.0)
    queue, request = kept.now()
    assert (queue.name, queue.seconds, queue.parent_id) == ("queue", 0.5, request.span_id)
    assert queue.began_ns == request.began_ns
    assert queue.attributes == {"n": 3}
    assert (request.role, request.seconds, request.kind) == ("router", 1.0, "SERVER")
    assert not request.is_error


def test_a_block_that_fails_is_a_part_with_the_reason() -> None:
    kept = Kept()
    with tracing.under(kept.tracing("router").begin("request")):
        with pytest.raises(QueueFull), tracing.part("queue"):
            raise QueueFull("17 wait")
        with pytest.raises(KeyError), tracing.part("other"):
            raise KeyError("x")
    assert [span.attributes["error.type"] for span in kept.now()] == ["QUEUE_FULL", "KeyError"]
    assert all(span.is_error for span in kept.now())


def test_what_goes_out_continues_the_span_in_another_process() -> None:
    kept = Kept()
    span = kept.tracing("router").begin("request")
    assert span is not None
    joined = kept.tracing("decode").join("decode", traceparent=span.traceparent)
    assert joined is not None
    joined.end()
    span.end()
    inner, outer = kept.now()
    assert (inner.role, inner.trace_id, inner.parent_id) == (
        "decode",
        outer.trace_id,
        outer.span_id,
    )
    assert inner.is_entry
    version, trace_id, span_id, flags = span.traceparent.split("-")
    assert (version, trace_id, span_id) == ("00", outer.trace_id, outer.span_id)
    assert int(flags, 16) & 1, "it says that the trace is recorded"


@pytest.mark.parametrize("traceparent", ["", "x", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-01"])
def test_what_names_no_trace_is_joined_by_nobody(traceparent: str) -> None:
    assert Kept().tracing("decode").join("decode", traceparent=traceparent) is None


def test_the_ratio_decides_for_traces_that_begin_here_and_the_client_for_its_own() -> None:
    never, always = Kept().tracing("r", sample_ratio=0.0), Kept().tracing("r", sample_ratio=1.0)
    assert never.begin("x") is None
    assert never.begin("x", traceparent=f"00-{TRACE}-{SPAN}-01") is not None
    assert always.begin("x", traceparent=f"00-{TRACE}-{SPAN}-00") is None
    half = Kept().tracing("r", sample_ratio=0.5)
    num_begun = sum(half.begin("x") is not None for _ in range(1000))
    # Five standard deviations: wrong once in 1.7 million runs.
    assert abs(num_begun - 500) < 80


async def test_tasks_that_a_span_begins_belong_to_it_and_others_do_not() -> None:
    kept = Kept()
    span = kept.tracing("router").begin("request")
    outside = asyncio.create_task(_current_after_a_turn())
    with tracing.under(span):
        inside = asyncio.create_task(_current_after_a_turn())
        with tracing.apart():
            apart = asyncio.create_task(_current_after_a_turn())
    assert tracing.current() is None
    assert await inside is span
    assert await outside is await apart is None


async def _current_after_a_turn() -> tracing.Span | None:
    await asyncio.sleep(0)
    return tracing.current()


def test_metadata_is_read_whatever_its_types() -> None:
    assert traceparent_of(None) == traceparent_of((("other", "x"),)) == ""
    assert traceparent_of((("other", "x"), ("traceparent", b"00-a"))) == "00-a"


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("format", ["json", "text"])
def test_a_line_that_is_written_under_a_span_names_its_trace(format: Any) -> None:
    stream = io.StringIO()
    configure_logging(level="info", format=format, role="decode", stream=stream)
    span = Kept().tracing("decode").begin("request")
    assert span is not None
    with tracing.under(span):
        logging.getLogger("kitchen").info("hot", extra={"request_id": "r-1"})
    logging.getLogger("kitchen").info("cold")
    hot, cold = stream.getvalue().splitlines()
    assert "trace_id" not in cold
    if format == "json":
        fields = json.loads(hot)
        assert (fields["trace_id"], fields["request_id"]) == (span.trace_id, "r-1")
    else:
        assert hot.endswith(f"hot trace_id={span.trace_id} request_id=r-1")
