"""Spans on their way to a collector that speaks OTLP, or is not there."""

from __future__ import annotations

import time

from common.telemetry.otel import CLOSE_S
from common.telemetry.tracing import TracingConfig, open_tracing
from tests.support.collector import collecting


def test_spans_that_wait_reach_the_collector_before_the_process_ends() -> None:
    with collecting() as collector:
        config = TracingConfig(endpoint=collector.endpoint)
        tracing = open_tracing(config, role="decode", version="1.2")
        span = tracing.begin("request")
        assert span is not None
        span.child("part").end()
        span.end()
        tracing.close()
        assert collector.spans == {
            "dspark-decode": [(span.trace_id, "part"), (span.trace_id, "request")]
        }


def test_a_collector_that_is_not_there_holds_nobody_up_for_long() -> None:
    tracing = open_tracing(TracingConfig(endpoint="http://127.0.0.1:1"), role="decode", version="1")
    began = time.monotonic()
    for _ in range(100):
        span = tracing.begin("request")
        assert span is not None
        span.end()
    assert time.monotonic() - began < CLOSE_S
    tracing.close()
    # Both of its waits are bounded; a busy machine gets as much again.
    assert time.monotonic() - began < 4 * CLOSE_S
