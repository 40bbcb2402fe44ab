"""An OpenTelemetry collector of twenty lines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass
class Collector(TraceServiceServicer):
    """What came, by the service that it is of: pairs of trace id and span name."""

    endpoint: str = ""
    spans: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        with self.lock:
            for resource in request.resource_spans:
                said = {a.key: a.value.string_value for a in resource.resource.attributes}
                spans = self.spans.setdefault(said["service.name"], [])
                for scope in resource.scope_spans:
                    spans += [(span.trace_id.hex(), span.name) for span in scope.spans]
        return pb.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of this machine."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    collector.endpoint = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
