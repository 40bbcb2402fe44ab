"""Which engine a process wants, and what it says when it cannot have it."""

from __future__ import annotations

import logging

import pytest

from common.errors import ConfigError
from common.rpc.channel import open_channel
from common.transfer import engines
from common.transfer.config import TransferConfig
from common.transfer.engine import TransferEngine
from common.transfer.engines import Engines, open_engines
from common.transfer.grpc_engine import GrpcTransferEngine
from common.transfer.memory import PoolMemory
from tests.support.small_cache import small_layout, small_pool


@pytest.fixture
def memory() -> PoolMemory:
    return PoolMemory(small_pool(small_layout()))


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Engines that cannot be had; all others are stood in for by gRPC's under another name."""
    names: set[str] = set()

    def open_one(name: str, config: TransferConfig, memory: PoolMemory) -> TransferEngine:
        if name in names:
            raise ConfigError(f"{name} cannot be imported")
        return GrpcTransferEngine(memory, open_channel)

    monkeypatch.setattr(engines, "_open", open_one)
    return names


def opened(engine: str, memory: PoolMemory) -> Engines:
    return open_engines(
        TransferConfig.named(engine), memory, GrpcTransferEngine(memory, open_channel)
    )


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", ("nixl", "grpc")),
        ("nixl", ("nixl", "grpc")),
        ("mooncake", ("mooncake", "grpc")),
        ("grpc", ("grpc",)),
    ],
)
def test_the_first_choice_comes_first_and_grpc_is_always_there(
    missing: set[str], memory: PoolMemory, choice: str, names: tuple[str, ...]
) -> None:
    """Mooncake takes writes from everybody who reaches its port, so nobody gets it who did not ask for it."""
    found = opened(choice, memory)
    assert found.names == names
    assert found.wanted == names[0]
    assert not found.missing


def test_a_named_engine_that_is_missing_is_a_warning_and_still_wanted(
    missing: set[str], memory: PoolMemory, caplog: pytest.LogCaptureFixture
) -> None:
    missing.add("nixl")
    found = opened("nixl", memory)
    assert (found.names, found.wanted) == (("grpc",), "nixl")
    assert found.missing == {"nixl": "nixl cannot be imported"}
    assert "transfer engine nixl is not used here: nixl cannot be imported" in caplog.text


def test_the_usual_choice_that_is_missing_is_no_warning_and_not_wanted(
    missing: set[str], memory: PoolMemory, caplog: pytest.LogCaptureFixture
) -> None:
    missing.add("nixl")
    with caplog.at_level(logging.INFO):
        found = opened("auto", memory)
    assert (found.names, found.wanted) == (("grpc",), "grpc")
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_an_engine_of_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'nixil'; give one of auto, nixl, mooncake, grpc"):
        TransferConfig.named("nixil")


def test_the_workers_host_is_used_where_none_was_given() -> None:
    assert TransferConfig().at("10.0.0.1").host == "10.0.0.1"
    assert TransferConfig(host="10.0.0.2").at("10.0.0.1").host == "10.0.0.2"
