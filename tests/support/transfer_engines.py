"""Transfer engines for tests: which can be had here, and receivers in processes of their own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.kv_cache.layout import CacheLayout, Region, Retention
from common.kv_cache.pool import CachePool
from common.rpc.channel import open_channel
from common.transfer.config import TransferConfig
from common.transfer.engine import TransferEngine
from common.transfer.engines import open_engines
from common.transfer.grpc_engine import GrpcTransferEngine
from common.transfer.meeting import EngineDescriptor
from common.transfer.memory import PoolMemory

ONE_SIDED = ("nixl", "nixl-tcp", "mooncake")
"""nixl-tcp is nixl as it is between machines without RDMA: the receiver has to help."""


def _why_missing(name: str) -> str:
    """Why an engine cannot be used here; empty when it can."""
    modules = {
        "grpc": (),
        "nixl": ("nixl_cu12._bindings", "nixl._bindings"),
        "mooncake": ("mooncake.engine",),
    }
    why = ""
    for module in modules[name.partition("-")[0]]:
        try:
            importlib.import_module(module)
        except ImportError as error:
            why = str(error)
        else:
            return ""
    return why


def engine_params(*names: str) -> list[Any]:
    """Parameters of a test, skipped with the reason where an engine cannot be imported."""
    return [
        pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=why))
        for name in names
        for why in [_why_missing(name)]
    ]


def transfer_config(name: str, monkeypatch: pytest.MonkeyPatch) -> TransferConfig:
    """The configuration that uses an engine."""
    if name == "nixl-tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
        name = "nixl"
    return TransferConfig.named(name)


def big_memory(num_pages: int) -> PoolMemory:
    """One region of pages of 64 KiB."""
    region = Region(
        name="csa",
        layer_ids=(0,),
        ratio=1,
        row_width=128,
        dtype="float32",
        retention=Retention.PAGED,
    )
    pool = CachePool(
        CacheLayout(regions=(region,)),
        num_pages=num_pages,
        num_slots=1,
        max_step_rows=1,
        device=torch.device("cpu"),
    )
    return PoolMemory(pool)


def open_engine(config: TransferConfig, memory: PoolMemory) -> TransferEngine:
    """The engine that a configuration names; it must be there."""
    engines = open_engines(config.at("127.0.0.1"), memory, GrpcTransferEngine(memory, open_channel))
    if config.engine not in engines.by_name:
        raise ConfigError(engines.missing[config.engine])
    return engines.by_name[config.engine]


class PeerProcess:
    """A receiver with an engine in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, descriptor: EngineDescriptor) -> None:
        self.descriptor = descriptor
        self._process = process

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def first_bytes(self, num_pages: int) -> list[int]:
        """The first byte of every page, as the peer sees it."""
        return list(base64.b64decode(await self._ask({"pages": num_pages})))

    async def _ask(self, question: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        answer: dict[str, str] = json.loads(await self._process.stdout.readline())
        return answer["answer"]


@contextlib.asynccontextmanager
async def peer_process(config: TransferConfig, *, num_pages: int) -> AsyncIterator[PeerProcess]:
    """A receiver that is there when this is entered, and gone when it is left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        config.engine,
        str(num_pages),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    said = json.loads(await process.stdout.readline())
    said["endpoint"] = base64.b64decode(said["endpoint"])
    said["region_addresses"] = tuple(said["region_addresses"])
    peer = PeerProcess(process, EngineDescriptor(**said))
    try:
        yield peer
    finally:
        await peer.kill()


async def _serve(name: str, num_pages: int) -> None:
    memory = big_memory(num_pages)
    engine = open_engine(TransferConfig.named(name), memory)
    engine.receive()
    descriptor = engine.descriptor
    said = {
        "name": descriptor.name,
        "endpoint": base64.b64encode(descriptor.endpoint).decode(),
        "region_addresses": descriptor.region_addresses,
        "probe_address": descriptor.probe_address,
        "device": descriptor.device,
    }
    print(json.dumps(said), flush=True)
    stride = memory.regions[0].block_stride_bytes
    while line := await asyncio.to_thread(sys.stdin.readline):
        pages = range(json.loads(line)["pages"])
        seen = bytes(memory.read(0, page * stride, 1)[0] for page in pages)
        print(json.dumps({"answer": base64.b64encode(seen).decode()}), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
