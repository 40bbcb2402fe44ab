"""One prefill and one decode worker, spoken to as a router does but without one. Knows the services' calls; sums nothing up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import TransferFailed
from common.rpc import convert
from common.rpc.channel import open_channel
from common.types import RequestContext, RequestId, SamplingParams, StopParams
from dspark.v1 import decode_service_pb2 as decode_pb
from dspark.v1 import prefill_service_pb2 as prefill_pb
from dspark.v1.decode_service_pb2_grpc import DecodeServiceStub
from dspark.v1.prefill_service_pb2_grpc import PrefillServiceStub

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """One request's hand-off, as it was said and as it was seen."""

    done: prefill_pb.HandoffDone
    admitted_s: float
    """From hearing the first token to hearing that decode runs the request; below 0 when that was heard before."""
    verified_s: float
    """From hearing the first token to hearing the first verified round."""
    placed_s: float
    """From asking for the prefill to hearing that decode runs the request."""


class WorkerPair:
    """The two workers, introduced to one another or not."""

    def __init__(self, prefill: Any, decode: Any, decode_address: str) -> None:
        self._prefill = prefill
        self._decode = decode
        self._decode_address = decode_address
        self._stream: Any = decode.Decode()
        self._events: dict[str, asyncio.Queue[tuple[float, decode_pb.DecodeEvent]]] = {}
        self._numbers = itertools.count()
        self._writing = asyncio.Lock()

    async def introduce(self) -> None:
        """What a router does before requests come."""
        info = (
            await self._decode.GetWorkerInfo(
                decode_pb.DecodeServiceGetWorkerInfoRequest(), timeout=TIMEOUT_S
            )
        ).info
        request = prefill_pb.ConnectRequest(
            decode_address=self._decode_address, decode_generation=info.generation
        )
        await self._prefill.Connect(request, timeout=TIMEOUT_S)

    async def run(self, prompt: Sequence[int], *, num_tokens: int) -> HandedOver:
        """Prefill, hand over and generate `num_tokens`, each round committed as it comes."""
        context = RequestContext(
            request_id=RequestId(f"bench-{next(self._numbers)}"),
            epoch=0,
            prompt=tuple(prompt),
            committed=[],
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_tokens=num_tokens, ignore_eos=True),
        )
        self._events[context.request_id] = asyncio.Queue()
        generating = asyncio.create_task(self._generate(context, len(prompt) + num_tokens))
        try:
            reserved = await self._admit(context)
            began = time.monotonic()
            first_at, done = await self._compute(context, reserved)
            admitted_at, verified_at = await asyncio.wait_for(generating, TIMEOUT_S)
        finally:
            generating.cancel()
            del self._events[context.request_id]
        return HandedOver(
            done=done,
            admitted_s=admitted_at - first_at,
            verified_s=verified_at - first_at,
            placed_s=admitted_at - began,
        )

    async def listen(self) -> None:
        """Hand every event to whom it is for, until cancelled."""
        async for response in self._stream:
            now = time.monotonic()
            for event in response.events:
                message = getattr(event, event.WhichOneof("event"))
                if message.request_id in self._events:
                    self._events[message.request_id].put_nowait((now, event))

    async def _admit(self, context: RequestContext) -> decode_pb.ReserveResponse:
        reserved: decode_pb.ReserveResponse = await self._decode.Reserve(
            decode_pb.ReserveRequest(
                request_id=context.request_id,
                epoch=context.epoch,
                num_tokens=context.length,
                max_length=context.max_length,
            ),
            timeout=TIMEOUT_S,
        )
        admit = decode_pb.Admit(
            request_id=context.request_id,
            epoch=context.epoch,
            reservation_id=reserved.reservation_id,
            capability=reserved.capability,
            context=convert.context_to_pb(context),
        )
        await self._send(decode_pb.DecodeCommand(admit=admit))
        return reserved

    async def _compute(
        self, context: RequestContext, reserved: decode_pb.ReserveResponse
    ) -> tuple[float, prefill_pb.HandoffDone]:
        """(when the first token came, what was said of the hand-off)."""
        ticket = prefill_pb.DecodeTicket(
            decode_address=self._decode_address,
            reservation_id=reserved.reservation_id,
            capability=reserved.capability,
        )
        request = prefill_pb.PrefillRequest(context=convert.context_to_pb(context), ticket=ticket)
        first_at = 0.0
        async for response in self._prefill.Prefill(request, timeout=TIMEOUT_S):
            if response.WhichOneof("event") == "first_token":
                first_at = time.monotonic()
            else:
                return first_at, response.handoff_done
        raise TransferFailed("the prefill ended without a hand-off")

    async def _generate(self, context: RequestContext, max_length: int) -> tuple[float, float]:
        """(when decode said that it runs the request, when the first round came); returns when it has ended."""
        events, admitted_at, verified_at = self._events[context.request_id], 0.0, 0.0
        while True:
            now, event = await events.get()
            match event.WhichOneof("event"):
                case "admitted":
                    admitted_at = now
                case "verified":
                    verified_at = verified_at or now
                    length = event.verified.base + len(event.verified.token_ids)
                    commit = decode_pb.Commit(
                        request_id=context.request_id,
                        epoch=context.epoch,
                        round=event.verified.round,
                        length=length,
                        finish=length >= max_length,
                    )
                    await self._send(decode_pb.DecodeCommand(commit=commit))
                case "finished":
                    return admitted_at, verified_at
                case _:
                    raise TransferFailed(f"{context.request_id}: {event.failed.message}")

    async def _send(self, command: decode_pb.DecodeCommand) -> None:
        async with self._writing:
            await self._stream.write(decode_pb.DecodeRequest(commands=[command]))


@contextlib.asynccontextmanager
async def worker_pair(prefill_address: str, decode_address: str) -> AsyncIterator[WorkerPair]:
    """The workers at two addresses, which nobody has introduced to one another so far."""
    prefill, decode = open_channel(prefill_address), open_channel(decode_address)
    try:
        pair = WorkerPair(PrefillServiceStub(prefill), DecodeServiceStub(decode), decode_address)
        listening = asyncio.create_task(pair.listen())
        try:
            yield pair
        finally:
            listening.cancel()
            await asyncio.wait((listening,))
    finally:
        await prefill.close()
        await decode.close()
