"""Claims about how values become messages and back."""

from __future__ import annotations

import pytest

import dspark
from dspark import _convert
from dspark.v1 import inference_service_pb2 as pb
from dspark.v1 import types_pb2


def request(prompt: object, **changes: object) -> pb.GenerateRequest:
    settings: dict[str, object] = {
        "request_id": "r1",
        "model": "",
        "sampling": dspark.SamplingParams(),
        "stop": dspark.StopParams(),
    }
    return _convert.generate_request(prompt, **{**settings, **changes})  # type: ignore[arg-type]


def test_text_ids_and_chat_go_into_their_own_fields() -> None:
    assert request("hello").text == "hello"
    assert list(request([1, 2, 3]).tokens.token_ids) == [1, 2, 3]
    as_dict = request([{"role": "user", "content": "hi"}])
    as_value = request([dspark.ChatMessage(role="user", content="hi")])
    assert as_dict == as_value
    assert as_dict.chat.messages[0].content == "hi"


def test_what_is_not_given_is_absent_on_the_wire() -> None:
    """Absent means the server's default; a zero temperature must not be mistaken for it."""
    silent = request("x").sampling
    for field in ("temperature", "top_k", "top_p", "seed", "logprobs"):
        assert not silent.HasField(field)
    assert not request("x").stop.HasField("max_tokens")
    greedy = request("x", sampling=dspark.SamplingParams(temperature=0, logprobs=0)).sampling
    assert greedy.HasField("temperature")
    assert greedy.HasField("logprobs")


def test_sampling_survives_the_round_trip() -> None:
    sampling = dspark.SamplingParams(
        temperature=0.5, top_k=3, top_p=0.25, seed=2**63 - 1, logprobs=2, verification="rejection"
    )
    message = request("x", sampling=sampling).sampling
    assert (
        _convert.model_info_from_pb(
            pb.GetModelInfoResponse(default_sampling=message)
        ).default_sampling
        == sampling
    )


def test_stop_conditions_arrive_whole() -> None:
    stop = dspark.StopParams(
        max_tokens=5, min_tokens=1, stop=("END", "\n"), stop_token_ids=(7,), ignore_eos=True
    )
    assert request("x", stop=stop).stop == types_pb2.StopParams(
        max_tokens=5, min_tokens=1, stop=["END", "\n"], stop_token_ids=[7], ignore_eos=True
    )


@pytest.mark.parametrize(
    "wrong", [[], [{"role": "user"}], [{"role": "user", "content": "x", "name": "y"}], [None]]
)
def test_a_prompt_of_no_known_kind_is_refused_before_it_is_sent(wrong: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        request(wrong)


def test_a_value_that_a_newer_server_invents_is_unspecified() -> None:
    worker = _convert.worker_from_pb(pb.Worker(role=99, state=99))  # type: ignore[arg-type]
    assert (worker.role, worker.state) == ("unspecified", "unspecified")
