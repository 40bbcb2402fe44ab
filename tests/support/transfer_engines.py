"""Transfer engines for tests: which can be had here, and receivers in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
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
from tests.support.waiting import WAIT_S

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


def available(*names: str) -> list[str]:
    """Those of them that can be imported here."""
    return [name for name in names if not _why_missing(name)]


def transfer_config(name: str, monkeypatch: pytest.MonkeyPatch) -> TransferConfig:
    """The configuration that uses an engine."""
    if name == "nixl-tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
        name = "nixl"
    return replace(TransferConfig.named(name), connect_timeout_s=WAIT_S)


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

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.descriptor: EngineDescriptor
        self._process = process
        self._pipe = pipe

    @property
    def cpu_s(self) -> float:
        """CPU time that all of its threads have had."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        _, _, fields = stat.rpartition(")")
        user, system = fields.split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    async def kill(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.join)

    async def first_bytes(self, num_pages: int) -> list[int]:
        """The first byte of every page, as the peer sees it."""
        self._pipe.send(num_pages)
        return list(await self.said())

    async def said(self) -> Any:
        """The next thing that it says."""
        has_spoken = await asyncio.to_thread(self._pipe.poll, WAIT_S)
        assert has_spoken, "the peer says nothing"
        return self._pipe.recv()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


@contextlib.asynccontextmanager
async def peer_process(config: TransferConfig, *, num_pages: int) -> AsyncIterator[PeerProcess]:
    """A receiver that is there when this is entered, and gone when it is left."""
    # Peers are forked from a process that has imported torch, once for all of them, and nothing else that matters.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    arguments = (config, num_pages, os.environ.get("UCX_TLS"), theirs)
    process = context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    theirs.close()
    peer = PeerProcess(process, ours)
    try:
        peer.descriptor = await peer.said()
        yield peer
    finally:
        await peer.kill()


def _serve(config: TransferConfig, num_pages: int, ucx_tls: str | None, pipe: Connection) -> None:
    # The process that this one was forked from knows an older environment.
    if ucx_tls is not None:
        os.environ["UCX_TLS"] = ucx_tls
    torch.set_num_threads(1)
    asyncio.run(_answer(config, num_pages, pipe))


async def _answer(config: TransferConfig, num_pages: int, pipe: Connection) -> None:
    memory = big_memory(num_pages)
    engine = open_engine(config, memory)
    engine.receive()
    pipe.send(engine.descriptor)
    stride = memory.regions[0].block_stride_bytes
    with contextlib.suppress(EOFError):
        while True:
            pages = range(await asyncio.to_thread(pipe.recv))
            pipe.send(bytes(memory.read(0, page * stride, 1)[0] for page in pages))
