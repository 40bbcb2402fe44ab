"""Claims about what the client offers, without a socket."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import dspark
from dspark.v1 import inference_service_pb2 as pb

CLIENTS = (dspark.Client, dspark.AsyncClient)


def method_of(rpc: str) -> str:
    """GetModelInfo becomes model_info, ListWorkers workers, Generate generate."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", re.sub("^(Get|List)", "", rpc)).lower()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "rpc", list(pb.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name)
)
def test_every_rpc_has_a_method(client: type, rpc: str) -> None:
    assert callable(getattr(client, method_of(rpc), None)), f"{client.__name__} lacks {rpc}"


def public_methods(client: type) -> dict[str, list[inspect.Parameter]]:
    return {
        name: list(inspect.signature(member).parameters.values())
        for name, member in inspect.getmembers(client, inspect.isfunction)
        if not name.startswith("_")
    }


def test_both_clients_take_the_same_arguments() -> None:
    assert public_methods(dspark.Client) == public_methods(dspark.AsyncClient)
    for client in CLIENTS:
        assert list(inspect.signature(client).parameters) == [
            "endpoint",
            "timeout",
            "retry",
            "keepalive",
            "tls",
            "api_key",
            "channel_options",
        ]


def test_everything_exported_exists_and_every_error_is_exported() -> None:
    for name in dspark.__all__:
        assert hasattr(dspark, name), name
    errors = {name for name, value in vars(dspark.errors).items() if isinstance(value, type)}
    assert errors <= set(dspark.__all__)


def test_every_error_is_a_dspark_error() -> None:
    for name in dspark.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(dspark, name), dspark.DSparkError)


def test_the_client_needs_neither_torch_nor_the_server() -> None:
    """Looked at in a fresh interpreter, since this one has imported everything."""
    code = "import dspark, sys; print([m for m in ('torch', 'common', 'services') if m in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert ran.stdout.strip() == "[]"


def test_the_stubs_work_with_the_oldest_protobuf_and_grpcio_that_the_client_allows() -> None:
    """Newer gencode refuses to import beside older runtimes, so the generator's version is part of the contract."""
    import dspark.v1.inference_service_pb2_grpc as stubs

    source = inspect.getsource(pb)
    assert "# Protobuf Python Version: 5.27.2" in source
    assert stubs.GRPC_GENERATED_VERSION == "1.67.1"


def test_one_stop_text_is_not_taken_for_its_letters() -> None:
    with pytest.raises(TypeError, match="tuple"):
        dspark.StopParams(stop="END")  # type: ignore[arg-type]


def test_mean_accepted_length_counts_the_target_token_of_each_round() -> None:
    usage = dspark.Usage(
        prompt_tokens=1, completion_tokens=9, rounds=2, draft_tokens=14, accepted_tokens=6
    )
    assert usage.mean_accepted_length == 4.0
    nothing = dspark.Usage(
        prompt_tokens=1, completion_tokens=1, rounds=0, draft_tokens=0, accepted_tokens=0
    )
    assert nothing.mean_accepted_length == 0.0
