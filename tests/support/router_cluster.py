"""A real router in front of fake workers, for tests of one service over sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio

from common.rpc.channel import open_channel
from dspark.v1 import inference_service_pb2 as pb
from dspark.v1.inference_service_pb2_grpc import InferenceServiceStub
from services.router import QueueConfig, RouterConfig, WorkerConfig, serve
from tests.support.fake_workers import FakeDecode, FakePrefill, serving

if TYPE_CHECKING:
    from dspark.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub


@dataclass(slots=True, kw_only=True)
class Cluster:
    """What a test talks to and scripts."""

    address: str
    stub: InferenceServiceAsyncStub
    channel: grpc.aio.Channel
    prefills: list[FakePrefill]
    decodes: list[FakeDecode]
    stop: asyncio.Event
    serving: asyncio.Task[None]

    @property
    def prefill(self) -> FakePrefill:
        return self.prefills[0]

    @property
    def decode(self) -> FakeDecode:
        return self.decodes[0]


def router_config(checkpoint_dir: Path) -> RouterConfig:
    """Quick to notice and quick to give up."""
    return RouterConfig(
        port=0,
        decode_addresses=("127.0.0.1:1",),
        checkpoint_dir=checkpoint_dir,
        model="tiny",
        drain_timeout_s=5.0,
        queue=QueueConfig(queue_timeout_s=5.0),
        workers=WorkerConfig(poll_period_s=0.05, poll_timeout_s=1.0),
    )


@contextlib.asynccontextmanager
async def cluster(
    config: RouterConfig, prefills: list[FakePrefill], decodes: list[FakeDecode]
) -> AsyncIterator[Cluster]:
    """Starts everything, and checks at the end that no request is left on any worker."""
    async with contextlib.AsyncExitStack() as stack:
        decode_servers = [await stack.enter_async_context(serving(d)) for d in decodes]
        prefill_servers = [await stack.enter_async_context(serving(p)) for p in prefills]
        by_address = {s.address: d for s, d in zip(decode_servers, decodes, strict=True)}
        for prefill in prefills:
            prefill.decodes = by_address
        config = replace(
            config,
            prefill_addresses=tuple(server.address for server in prefill_servers),
            decode_addresses=tuple(server.address for server in decode_servers),
        )
        stop = asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve(config, ready=ready.set_result, stop=stop))
        async with asyncio.timeout(10):
            await asyncio.wait((ready, task), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        address = ready.result()
        channel = open_channel(address)
        stub = InferenceServiceStub(channel)
        try:
            yield Cluster(
                address=address,
                stub=stub,
                channel=channel,
                prefills=prefills,
                decodes=decodes,
                stop=stop,
                serving=task,
            )
            for decode in decodes:
                await decode.seen.until(lambda d=decode: not d.live_keys)  # type: ignore[misc]
        finally:
            stop.set()
            await channel.close()
            async with asyncio.timeout(10):
                await task


def generate_request(num_prompt: int = 8, **fields: object) -> pb.GenerateRequest:
    """A greedy request for a prompt of token ids."""
    request = pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=range(10, 10 + num_prompt)))
    request.sampling.temperature = 0.0
    request.MergeFrom(pb.GenerateRequest(**fields))  # type: ignore[arg-type]
    return request


async def collect(
    call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse],
) -> list[pb.GenerateResponse]:
    async with asyncio.timeout(20):
        return [response async for response in call]
