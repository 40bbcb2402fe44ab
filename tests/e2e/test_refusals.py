"""Everything that is refused says why, in a typed error, and holds nothing afterwards.

`nothing_is_left_behind` (conftest) compares free pages and slots of both workers with those at rest after each test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import dspark
from common.rpc import convert as rpc_convert
from common.transfer import convert
from common.transfer.handoff import CacheContract
from common.types import RequestContext, RequestId, SamplingParams, StopParams
from dspark._status import error_from_call
from dspark.v1 import cache_pb2, decode_service_pb2, handoff_service_pb2, inference_service_pb2
from dspark.v1.decode_service_pb2_grpc import DecodeServiceStub
from dspark.v1.handoff_service_pb2_grpc import HandoffServiceStub
from dspark.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.asking import Ask, ask_all, exactly
from tests.support.solo import Solo
from tests.support.system import EventLoop, System, SystemOptions
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.e2e

PROMPT = tuple(range(10, 30))
GENERATION = "test"


@pytest.fixture
def client(system: System) -> Iterator[dspark.Client]:
    with dspark.Client(system.address, timeout=WAIT_S) as opened:
        yield opened


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": dspark.SamplingParams(**fields)}


def stop(**fields: Any) -> dict[str, Any]:
    return {"stop": dspark.StopParams(**fields)}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (sampling(temperature=-0.5), "temperature"),
        (sampling(temperature=float("nan")), "temperature"),
        (sampling(top_p=0.0), "top_p"),
        (sampling(top_p=1.5), "top_p"),
        (sampling(logprobs=21), "logprobs"),
        (sampling(seed=2**63), "seed"),
        (stop(max_tokens=0), "max_tokens"),
        (stop(max_tokens=4, min_tokens=5), "min_tokens"),
        (stop(max_tokens=4, stop=("",)), "stop string"),
        (stop(max_tokens=4, stop=("x" * 257,)), "stop string"),
        (stop(max_tokens=4, stop=("x",) * 17), "stop strings"),
        (stop(max_tokens=4, stop_token_ids=(2048,)), "2048"),
        ({"prompt": (10, 2048)}, "2048"),
        ({"request_id": "x" * 129}, "request_id"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_value_out_of_range_is_a_bad_request_that_names_it(
    client: dspark.Client, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(dspark.BadRequestError, match=named) as caught:
        client.generate(**{"prompt": PROMPT, **arguments})
    assert caught.value.reason == "INVALID_PARAMETER"


@pytest.mark.parametrize("num_prompt", [4096, 5000])
def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(
    client: dspark.Client, num_prompt: int
) -> None:
    with pytest.raises(dspark.ContextLengthExceededError) as caught:
        client.generate([10] * num_prompt)
    assert caught.value.metadata == {"prompt_tokens": str(num_prompt), "limit": "4096"}


def test_more_tokens_than_the_context_holds_are_refused_with_the_numbers(
    client: dspark.Client,
) -> None:
    with pytest.raises(dspark.ContextLengthExceededError) as caught:
        client.generate(PROMPT, stop=dspark.StopParams(max_tokens=4077))
    assert caught.value.metadata == {"prompt_tokens": "20", "max_tokens": "4077", "limit": "4096"}


def test_an_unknown_model_is_not_found_and_the_served_one_is_named(client: dspark.Client) -> None:
    with pytest.raises(dspark.NotFoundError, match="dspark-tiny") as caught:
        client.generate(PROMPT, model="another")
    assert caught.value.reason == "MODEL_NOT_FOUND"


def test_a_message_beyond_the_limit_is_refused(system: System) -> None:
    """By a client without a limit of its own, as other languages have it."""
    request = inference_service_pb2.GenerateRequest(text="x" * (65 * 1024 * 1024))
    unlimited = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(system.address, options=unlimited) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(InferenceServiceStub(channel).Generate(request, timeout=WAIT_S))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than" in str(caught.value.details())


def test_an_id_that_is_in_use_is_refused_and_its_owner_goes_on(client: dspark.Client) -> None:
    num_tokens = 400  # far from its end when the other one comes
    with client.generate(PROMPT, request_id="mine", stop=exactly(num_tokens), stream=True) as first:
        next(first)
        with pytest.raises(dspark.BadRequestError) as caught:
            client.generate(PROMPT, request_id="mine", stop=exactly(4))
        assert caught.value.reason == "DUPLICATE_REQUEST"
        assert first.read().usage.completion_tokens == num_tokens


def test_requests_wait_for_room_and_one_that_can_never_have_it_is_refused_at_once(
    servers: EventLoop, shipped_checkpoint: Path
) -> None:
    """Two pages on each worker: one request at a time, and none beyond 256 tokens."""
    options = SystemOptions(checkpoint_dir=shipped_checkpoint, num_pages=2, num_slots=2)
    with System(servers, options).running() as small:
        answers = ask_all(small.address, [Ask(prompt=PROMPT, stop=exactly(150))] * 3)
        assert [len(answer.token_ids) for answer in answers] == [150] * 3
        with dspark.Client(small.address, timeout=WAIT_S) as client:
            with pytest.raises(dspark.ContextLengthExceededError) as caught:
                client.generate(PROMPT, stop=exactly(237))
            assert caught.value.metadata["limit"] == "256"
            with client.generate(PROMPT, stop=exactly(236), stream=True) as running:
                next(running)
                with pytest.raises(dspark.APITimeoutError):
                    client.generate(PROMPT, stop=exactly(236), timeout=0.2)
        small.wait_at_rest()


class Reserved:
    """A reservation on the decode worker, made by hand."""

    def __init__(self, system: System, channel: grpc.Channel) -> None:
        self.decode = DecodeServiceStub(channel)
        self.handoff = HandoffServiceStub(channel)
        self.context = RequestContext(
            request_id=RequestId("by-hand"),
            epoch=0,
            prompt=PROMPT,
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_tokens=8),
        )
        self.ticket = self.decode.Reserve(
            decode_service_pb2.ReserveRequest(
                request_id="by-hand", epoch=0, num_tokens=len(PROMPT), max_length=len(PROMPT) + 8
            ),
            timeout=WAIT_S,
        )

    def meet(self, contract: cache_pb2.CacheContract) -> handoff_service_pb2.MeetResponse:
        """Introduce this test as a prefill worker."""
        request = handoff_service_pb2.MeetRequest(
            prefill_generation=GENERATION,
            prefill_address="127.0.0.1:1",
            contract=contract,
            transfer_engines=["grpc"],
        )
        response: handoff_service_pb2.MeetResponse = self.handoff.Meet(request, timeout=WAIT_S)
        return response

    def negotiate(
        self, met: handoff_service_pb2.MeetResponse, capability: bytes
    ) -> handoff_service_pb2.NegotiateResponse:
        request = handoff_service_pb2.NegotiateRequest(
            key=handoff_service_pb2.HandoffKey(
                request_id="by-hand",
                epoch=0,
                reservation_id=self.ticket.reservation_id,
                prefill_generation=GENERATION,
            ),
            capability=capability,
            num_tokens=len(PROMPT),
            decode_generation=met.decode_generation,
            transfer_engine=met.engine.name,
        )
        response: handoff_service_pb2.NegotiateResponse = self.handoff.Negotiate(
            request, timeout=WAIT_S
        )
        return response

    def command(self, **command: Any) -> decode_service_pb2.DecodeEvent:
        """The first event after one command on a stream of its own."""
        request = decode_service_pb2.DecodeRequest(
            commands=[decode_service_pb2.DecodeCommand(**command)]
        )
        for response in self.decode.Decode(iter([request]), timeout=WAIT_S):
            return response.events[0]
        raise AssertionError("the stream ended without an event")

    def abort(self) -> None:
        event = self.command(
            abort=decode_service_pb2.Abort(
                request_id="by-hand", epoch=0, reservation_id=self.ticket.reservation_id
            )
        )
        assert event.WhichOneof("event") == "finished"


@pytest.fixture
def reserved(system: System) -> Iterator[Reserved]:
    """Given back at the end, so that only what was refused could be left."""
    with grpc.insecure_channel(system.decode_address) as channel:
        reservation = Reserved(system, channel)
        yield reservation
        reservation.abort()


@pytest.fixture
def contract(plain: Solo) -> cache_pb2.CacheContract:
    """What a prefill worker of the same model offers."""
    loaded = plain.loaded
    return convert.contract_to_pb(
        CacheContract(
            model_fingerprint=loaded.fingerprint,
            layout=loaded.layout,
            drafter_fingerprint=loaded.drafter_fingerprint,
        )
    )


def refusal(call: Callable[[], object]) -> dspark.APIStatusError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error = error_from_call(caught.value, request_id="by-hand")
    assert isinstance(error, dspark.APIStatusError)
    return error


def test_the_wrong_capability_may_not_write_and_may_not_run(
    reserved: Reserved, contract: cache_pb2.CacheContract
) -> None:
    met = reserved.meet(contract)
    error = refusal(lambda: reserved.negotiate(met, capability=b"guess"))
    assert error.reason == "CAPABILITY_REFUSED"
    event = reserved.command(
        admit=decode_service_pb2.Admit(
            request_id="by-hand",
            epoch=0,
            reservation_id=reserved.ticket.reservation_id,
            capability=b"guess",
            context=rpc_convert.context_to_pb(reserved.context),
        )
    )
    assert event.failed.reason == "CAPABILITY_REFUSED"


CHANGES: dict[str, Callable[[cache_pb2.CacheRegion], object]] = {
    "layer_ids": lambda region: region.layer_ids.append(99),
    "ratio": lambda region: setattr(region, "ratio", region.ratio * 2),
    "row_width": lambda region: setattr(region, "row_width", region.row_width + 1),
    "dtype": lambda region: setattr(region, "dtype", "bfloat16"),
    "retention": lambda region: setattr(region, "retention", 3 - region.retention),
    "window_rows": lambda region: setattr(region, "window_rows", region.window_rows + 1),
    "tail_group": lambda region: setattr(region, "tail_group", region.tail_group + 1),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_contract_that_differs_in_one_field_is_refused_with_that_field(
    reserved: Reserved, contract: cache_pb2.CacheContract, field: str
) -> None:
    changed = contract.regions[0]
    CHANGES[field](changed)
    error = refusal(lambda: reserved.meet(contract))
    assert error.reason == "CONTRACT_MISMATCH"
    assert error.metadata == {"region": changed.name, "field": field}


def test_another_model_is_refused_by_its_fingerprint(
    reserved: Reserved, contract: cache_pb2.CacheContract
) -> None:
    contract.model_fingerprint = "another"
    error = refusal(lambda: reserved.meet(contract))
    assert error.reason == "CONTRACT_MISMATCH"
    assert error.metadata == {"field": "model_fingerprint"}


def test_the_right_contract_and_capability_are_accepted(
    reserved: Reserved, contract: cache_pb2.CacheContract
) -> None:
    """Without this, the refusals above could all have another cause."""
    met = reserved.meet(contract)
    assert met.engine.name == "grpc"
    assert len(reserved.negotiate(met, reserved.ticket.capability).page_ids) == 1


def test_a_client_is_told_which_field_two_workers_disagree_on(
    servers: EventLoop, shipped_checkpoint: Path
) -> None:
    """Prefill in bfloat16 and decode in float32 hold the same model and cannot exchange its state."""
    options = SystemOptions(
        checkpoint_dir=shipped_checkpoint, prefill_dtype="bfloat16", can_hand_over=False
    )
    with System(servers, options).running() as system:
        with (
            dspark.Client(system.address, timeout=WAIT_S) as client,
            pytest.raises(dspark.APIStatusError, match=r"dtype.*float32.*bfloat16") as caught,
        ):
            client.generate(PROMPT, stop=exactly(8))
        assert "CONTRACT_MISMATCH" in (caught.value.reason, caught.value.metadata.get("cause"))
        system.wait_at_rest()
