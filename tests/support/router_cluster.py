"""A real router in front of fake workers, for tests of one service over sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import pytest

from common.errors import ServingError
from common.rpc.channel import open_channel
from common.rpc.status import error_of_call
from dspark.v1 import inference_service_pb2 as pb
from dspark.v1 import types_pb2
from dspark.v1.inference_service_pb2_grpc import InferenceServiceStub
from services.router import QueueConfig, RouterConfig, WorkerConfig, serve
from tests.support.fake_workers import FakeDecode, FakePrefill, serving
from tests.support.waiting import LOOK_S, WAIT_S

if TYPE_CHECKING:
    from dspark.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub

SEQUENCE = list(range(40, 140))
"""What scripted workers generate."""
STOP = types_pb2.StopParams(max_tokens=30)


@dataclass(slots=True, kw_only=True)
class Cluster:
    """What a test talks to and scripts."""

    address: str
    stub: InferenceServiceAsyncStub
    channel: grpc.aio.Channel
    prefills: list[FakePrefill]
    decodes: list[FakeDecode]
    decode_addresses: list[str]
    stop: asyncio.Event
    serving: asyncio.Task[None]

    @property
    def prefill(self) -> FakePrefill:
        return self.prefills[0]

    @property
    def decode(self) -> FakeDecode:
        return self.decodes[0]


def router_config(checkpoint_dir: Path) -> RouterConfig:
    """Quick to ask, and in no hurry to give anybody up: a busy machine is no reason."""
    return RouterConfig(
        port=0,
        decode_addresses=("127.0.0.1:1",),
        checkpoint_dir=checkpoint_dir,
        model="tiny",
        drain_timeout_s=WAIT_S,
        queue=QueueConfig(queue_timeout_s=WAIT_S),
        workers=WorkerConfig(poll_period_s=0.05, poll_timeout_s=WAIT_S, reserve_timeout_s=WAIT_S),
    )


@contextlib.asynccontextmanager
async def cluster(
    config: RouterConfig, prefills: list[FakePrefill], decodes: list[FakeDecode]
) -> AsyncIterator[Cluster]:
    """Starts everything; there when the router has heard of every worker. Checks at the end that no request is left on any."""
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
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait((ready, task), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        address = ready.result()
        channel = open_channel(address)
        stub = InferenceServiceStub(channel)
        try:
            # It is ready with the first of each role; tests count on all of them, in the order of configuration.
            await workers_seen(stub, lambda workers: all(map(_is_there, workers)))
            yield Cluster(
                address=address,
                stub=stub,
                channel=channel,
                prefills=prefills,
                decodes=decodes,
                decode_addresses=list(by_address),
                stop=stop,
                serving=task,
            )
            for decode in decodes:
                await decode.seen.until(lambda d=decode: not d.live_keys)  # type: ignore[misc]
        finally:
            stop.set()
            await channel.close()
            async with asyncio.timeout(WAIT_S):
                await task


async def workers_seen(
    stub: InferenceServiceAsyncStub, is_true: Callable[[Sequence[pb.Worker]], bool]
) -> None:
    """Wait until the router's view of its workers is as wanted."""
    async with asyncio.timeout(WAIT_S):
        while True:
            listed = await stub.ListWorkers(pb.ListWorkersRequest())
            if is_true(listed.workers):
                return
            await asyncio.sleep(LOOK_S)


def _is_there(worker: pb.Worker) -> bool:
    return worker.state in (pb.WORKER_STATE_READY, pb.WORKER_STATE_DRAINING)


def generate_request(num_prompt: int = 8, **fields: object) -> pb.GenerateRequest:
    """A greedy request for a prompt of token ids."""
    request = pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=range(10, 10 + num_prompt)))
    request.sampling.temperature = 0.0
    request.MergeFrom(pb.GenerateRequest(**fields))  # type: ignore[arg-type]
    return request


async def collect(
    call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse],
) -> list[pb.GenerateResponse]:
    async with asyncio.timeout(WAIT_S):
        return [response async for response in call]


async def error_of(
    call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse],
) -> ServingError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return error_of_call(caught.value, peer="router")


def tokens_of(responses: Sequence[pb.GenerateResponse]) -> list[int]:
    return [token for response in responses for token in response.token_ids]
