"""What metrics cost: the same load on one system, with its measuring on and off in turns. Knows what measures; serves nothing itself.

All three services and the clients share this process, so what measuring takes is taken from all of them at once: the
figures are upper bounds. A scrape's own time is told beside them, as a share of the time between two.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.load import drive
from benchmarks.prompts import load_prompts
from common.engine.meter import StepMeter
from common.engine.settings import EngineSettings
from common.telemetry.tracing import OFF, Tracing
from common.transfer.config import TransferConfig
from services.cli.ports import free_ports
from services.decode.app import serve as serve_decode
from services.decode.config import DecodeConfig
from services.prefill.app import serve as serve_prefill
from services.prefill.config import PrefillConfig
from services.router import RouterConfig
from services.router import serve as serve_router
from services.router.meter import RequestMeter

CONCURRENCY = 16
NUM_SCRAPES = 20
SCRAPE_PERIOD_S = 15.0
"""As often as the chart has it."""
MEASURING = (
    (StepMeter, "count"),
    (RequestMeter, "placed"),
    (RequestMeter, "saw"),
    (RequestMeter, "committed"),
    (RequestMeter, "_end"),
)
"""All that is called once per step, round or request."""


@dataclass(slots=True)
class Spent:
    """Seconds that measuring took, waits for the interpreter included."""

    seconds: float = 0.0

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - begin

        return call


def run_metrics(
    checkpoint_dir: Path, say: Callable[[str], None], *, num_turns: int
) -> dict[str, float]:
    """Throughput with metrics over throughput without, and the share of time that measuring takes."""
    torch.set_num_threads(1)
    return asyncio.run(_run(checkpoint_dir, say, num_turns))


async def _run(
    checkpoint_dir: Path, say: Callable[[str], None], num_turns: int
) -> dict[str, float]:
    prompts = [prompt for prompt in load_prompts() if prompt.is_unseen]
    ratios: list[float] = []
    shares: list[float] = []

    async def tokens_per_s() -> float:
        run = await drive(address, prompts, concurrency=CONCURRENCY)
        return run.total_tokens_per_s

    async def unmeasured() -> float:
        with _replaced(lambda method: lambda *args: None):
            return await tokens_per_s()

    async with system(checkpoint_dir) as (address, admin_ports):
        say("warming up")
        await drive(address, prompts[:4], concurrency=4, max_tokens=24)
        for turn in range(num_turns):
            is_measured_first = turn % 2 == 0
            order = (tokens_per_s, unmeasured) if is_measured_first else (unmeasured, tokens_per_s)
            first, second = [await run() for run in order]
            on, off = (first, second) if is_measured_first else (second, first)
            ratios.append(on / off)
            spent, began = Spent(), time.perf_counter()
            with _replaced(spent.timed):
                await tokens_per_s()
            shares.append(spent.seconds / (time.perf_counter() - began))
            say(f"turn {turn + 1}/{num_turns}: on/off {ratios[-1]:.4f}, share {shares[-1]:.4f}")
        scrape_s = max([await _scrape_s(port) for port in admin_ports])
    return {
        "metrics.throughput_ratio": statistics.median(ratios),
        "metrics.throughput_ratio_spread": max(ratios) - min(ratios),
        "metrics.share_of_time": statistics.median(shares),
        "metrics.scrape_s": scrape_s,
        "metrics.scrape_share_of_time": scrape_s / SCRAPE_PERIOD_S,
    }


@contextlib.contextmanager
def _replaced(replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Every measuring method is another one until the block ends."""
    with contextlib.ExitStack() as stack:
        for owner, name in MEASURING:
            method = replace(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, method))
        yield


async def _scrape_s(port: int) -> float:
    """Seconds that a process takes to tell all of its metrics, the median of some."""
    seconds = []
    for _ in range(NUM_SCRAPES):
        begin = time.perf_counter()
        await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/metrics")
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _get(url: str) -> None:
    with urllib.request.urlopen(url, timeout=10) as answer:
        answer.read()


@contextlib.asynccontextmanager
async def system(
    checkpoint_dir: Path, tracing: Callable[[str], Tracing] = lambda role: OFF
) -> AsyncIterator[tuple[str, list[int]]]:
    """The router's address and all admin ports; everything is gone at the end. `tracing` is asked for each role's."""
    ports = free_ports("127.0.0.1", 3)
    # Of two NIXL agents in one process, the library ends the process with a fault at its exit.
    common: dict[str, Any] = {
        "port": 0,
        "model": checkpoint_dir.name,
        "engine": EngineSettings(checkpoint_dir=checkpoint_dir),
        "transfer": TransferConfig(engine="grpc"),
    }
    async with contextlib.AsyncExitStack() as stack:
        decode = DecodeConfig(admin_port=ports[0], **common)
        decode_address = await stack.enter_async_context(
            _serving(serve_decode, decode, tracing("decode"))
        )
        prefill = PrefillConfig(admin_port=ports[1], **common)
        prefill_address = await stack.enter_async_context(
            _serving(serve_prefill, prefill, tracing("prefill"))
        )
        router = RouterConfig(
            port=0,
            admin_port=ports[2],
            model=checkpoint_dir.name,
            checkpoint_dir=checkpoint_dir,
            decode_addresses=(decode_address,),
            prefill_addresses=(prefill_address,),
        )
        yield (
            await stack.enter_async_context(_serving(serve_router, router, tracing("router"))),
            list(ports),
        )


@contextlib.asynccontextmanager
async def _serving(serve: Any, config: object, tracing: Tracing) -> AsyncIterator[str]:
    """One service from its readiness on; its address."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(config, ready=ready.set_result, stop=stop, tracing=tracing))
    try:
        await asyncio.wait((ready, serving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        yield ready.result()
    finally:
        stop.set()
        await serving
