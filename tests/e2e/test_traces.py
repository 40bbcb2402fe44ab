"""One trace a request, through router, prefill, transfer and decode, on real workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import grpc
import pytest

from dspark.v1 import inference_service_pb2 as pb
from dspark.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.spans import Ended, Kept
from tests.support.system import System

pytestmark = pytest.mark.e2e

TIMEOUT_S = 60.0
NUM_PROMPT, NUM_TOKENS = 300, 40
CLIENT_TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OTHER_TRACE = "7bf92f3577b34da6a3ce929d0e0e4736"
STAGES = [
    "tokenize",
    "queue",
    "reserve",
    "prefill",
    "kv_transfer",
    "decode_wait",
    "decode",
    "finish",
]
PREFILL_PARTS = {
    "dspark.v1.PrefillService/Prefill",
    "prefill.queue",
    "prefill.compute",
    "prefill.draft",
    "kv_transfer.negotiate",
    "kv_transfer.send",
    "kv_transfer.complete",
}
DECODE_PARTS = {
    "dspark.v1.DecodeService/Reserve",
    "dspark.v1.HandoffService/Negotiate",
    "dspark.v1.HandoffService/Complete",
    "decode",
    "decode.wait_for_state",
    "decode.run",
}


@pytest.fixture
def stub(traced: System, spans: Kept) -> Iterator[InferenceServiceStub]:
    spans.clear()
    with grpc.insecure_channel(traced.address) as channel:
        yield InferenceServiceStub(channel)


def ask(
    stub: InferenceServiceStub, *, traceparent: str = "", max_tokens: int = NUM_TOKENS
) -> pb.Completion:
    metadata = (("traceparent", traceparent),) if traceparent else ()
    *_, last = stub.Generate(a_request(max_tokens), metadata=metadata, timeout=TIMEOUT_S)
    return last.completion


def a_request(max_tokens: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=range(100, 100 + NUM_PROMPT)))
    request.sampling.temperature = 0.0
    request.stop.max_tokens = max_tokens
    request.stop.ignore_eos = True
    return request


class Trace:
    """All spans of one request, complete once every process has let go of it."""

    def __init__(self, spans: Kept) -> None:
        self.spans = spans.until(_is_complete)
        (self.root,) = [s for s in self.spans if s.role == "router" and s.is_entry]

    def named(self, role: str, name: str) -> list[Ended]:
        return [span for span in self.spans if (span.role, span.name) == (role, name)]

    def only(self, role: str, name: str) -> Ended:
        (span,) = self.named(role, name)
        return span

    @property
    def stages(self) -> list[Ended]:
        """What the router says that the request went through."""
        below = [s for s in self.spans if s.role == "router" and s.parent_id == self.root.span_id]
        return sorted(below, key=lambda span: (span.began_ns, span.ended_ns))


def test_one_trace_has_all_stages_and_their_durations_add_up_to_the_requests(
    stub: InferenceServiceStub, spans: Kept
) -> None:
    completion = ask(stub)
    trace = Trace(spans)
    assert len({span.trace_id for span in trace.spans}) == 1
    assert (trace.root.kind, trace.root.parent_id) == ("SERVER", "")
    assert [stage.name for stage in trace.stages] == STAGES
    total_s = sum(stage.seconds for stage in trace.stages)
    assert total_s == pytest.approx(trace.root.seconds, rel=0.02)
    # They add up because each begins where the one before it ends.
    for before, after in itertools.pairwise(trace.stages):
        assert before.ended_ns == after.began_ns
    # The client was told of the time between its last token and the request's end.
    until_last_token_s = total_s - trace.stages[-1].seconds
    told_s = completion.timings.total_s
    assert until_last_token_s - 1e-6 <= told_s <= trace.root.seconds + 1e-6


def test_the_workers_parts_are_in_the_trace_where_the_router_waited_for_them(
    stub: InferenceServiceStub, spans: Kept, traced: System
) -> None:
    ask(stub)
    traced.wait_at_rest()  # what cleans up after the request is no part of it
    trace = Trace(spans)
    assert {span.name for span in trace.spans if span.role == "prefill"} == PREFILL_PARTS
    # What has arrived already is told beside a hand-off, and nobody waits for it.
    parts = {span.name for span in trace.spans if span.role == "decode"}
    assert parts - {"dspark.v1.HandoffService/Arrived"} == DECODE_PARTS
    known = {span.span_id for span in trace.spans}
    assert all(span.parent_id in known for span in trace.spans if span is not trace.root)
    call = trace.only("prefill", "dspark.v1.PrefillService/Prefill")
    assert call.parent_id == trace.root.span_id
    for name in PREFILL_PARTS - {call.name}:
        assert all(span.parent_id == call.span_id for span in trace.named("prefill", name)), name
    # Hand-off calls are below what the prefill worker made them for.
    negotiate = trace.only("decode", "dspark.v1.HandoffService/Negotiate")
    assert negotiate.parent_id == trace.only("prefill", "kv_transfer.negotiate").span_id
    # All three have one clock here: the router's stages enclose what they stand for.
    prefill, compute = trace.only("router", "prefill"), trace.only("prefill", "prefill.compute")
    assert prefill.began_ns < compute.began_ns < compute.ended_ns < prefill.ended_ns
    waited = trace.only("decode", "decode.wait_for_state")
    assert waited.ended_ns <= trace.only("router", "kv_transfer").ended_ns
    run = trace.only("decode", "decode.run")
    assert run.began_ns < trace.only("router", "decode").began_ns


def test_rounds_and_figures_are_those_of_the_answer(
    stub: InferenceServiceStub, spans: Kept
) -> None:
    completion = ask(stub)
    trace = Trace(spans)
    usage, said = completion.usage, trace.root.attributes
    assert trace.root.name == "text_completion dspark-tiny"
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "dspark-tiny"
    assert said["gen_ai.request.max_tokens"] == NUM_TOKENS
    assert said["gen_ai.usage.input_tokens"] == NUM_PROMPT
    assert said["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    accepted_length = 1 + usage.accepted_tokens / usage.rounds
    assert said["dspark.accepted_length"] == pytest.approx(accepted_length)
    assert said["dspark.decode_worker"] == completion.route.decode_worker
    assert said["dspark.transfer_engine"] == completion.route.transfer_engine
    run = trace.only("decode", "decode.run")
    rounds = [attributes for name, attributes in run.events if name == "round"]
    # The last round may be cut at the limit, and others may have run ahead of it.
    assert len(rounds) >= usage.rounds
    accepted = [attributes["dspark.accepted_tokens"] for attributes in rounds[: usage.rounds]]
    assert sum(accepted[:-1]) <= usage.accepted_tokens <= sum(accepted)
    assert run.attributes["dspark.rounds"] == len(rounds)
    sent = trace.named("prefill", "kv_transfer.send")
    assert all(span.attributes["dspark.bytes"] > 0 for span in sent)


def test_a_clients_trace_is_continued(stub: InferenceServiceStub, spans: Kept) -> None:
    ask(stub, traceparent=f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01")
    trace = Trace(spans)
    assert {span.trace_id for span in trace.spans} == {CLIENT_TRACE}
    assert trace.root.parent_id == CLIENT_SPAN


def test_a_trace_that_the_client_does_not_record_is_recorded_by_nobody(
    stub: InferenceServiceStub, spans: Kept, traced: System
) -> None:
    ask(stub, traceparent=f"00-{OTHER_TRACE}-{CLIENT_SPAN}-00")
    traced.wait_at_rest()
    assert OTHER_TRACE not in {span.trace_id for span in spans.now()}


@pytest.mark.parametrize("traceparent", ["", "00-", "no trace", "00-0-0-01"])
def test_a_header_that_names_no_trace_begins_a_new_one(
    stub: InferenceServiceStub, spans: Kept, traceparent: str
) -> None:
    ask(stub, traceparent=traceparent, max_tokens=2)
    assert Trace(spans).root.parent_id == ""


def test_a_request_that_its_client_leaves_is_a_trace_that_says_so_in_every_process(
    stub: InferenceServiceStub, spans: Kept
) -> None:
    call = stub.Generate(a_request(max_tokens=3000), timeout=TIMEOUT_S)
    next(call)
    call.cancel()
    trace = Trace(spans)
    assert trace.root.attributes["error.type"] == "CANCELLED"
    total_s = sum(stage.seconds for stage in trace.stages)
    assert total_s == pytest.approx(trace.root.seconds, rel=0.02)
    assert not trace.only("decode", "decode").is_error, "the router ended it, which is no failure"


def test_a_refused_request_is_a_trace_with_its_reason(
    stub: InferenceServiceStub, spans: Kept
) -> None:
    with pytest.raises(grpc.RpcError):
        ask(stub, max_tokens=10**6)
    ended = spans.until(lambda ended: any(span.is_error for span in ended))
    (root,) = [span for span in ended if span.is_error]
    (stage,) = [span for span in ended if span.parent_id == root.span_id]
    assert (stage.name, root.is_entry) == ("tokenize", True)
    assert root.attributes["error.type"] == "CONTEXT_LENGTH_EXCEEDED"
    assert stage.seconds == root.seconds


def _is_complete(spans: list[Ended]) -> bool:
    """The last part in every process has ended."""
    ended = {(span.role, span.name) for span in spans}
    last = {("prefill", "dspark.v1.PrefillService/Prefill"), ("decode", "decode")}
    return last <= ended and any(span.role == "router" and span.is_entry for span in spans)
