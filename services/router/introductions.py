"""Has every prefill worker meet every decode worker before a request needs the two. Knows pairs; no requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import grpc
import grpc.aio

from common.rpc.status import error_of_call
from dspark.v1 import prefill_service_pb2 as pb
from services.router.policy import WorkerState

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 15.0
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 10.0
"""So much later than two workers can a router know that they reach each other again, which may be what it is not ready for."""


class Known(Protocol):
    """A worker, as far as introductions go."""

    address: str
    state: WorkerState

    @property
    def generation(self) -> str: ...


class Introducer(Known, Protocol):
    """A prefill worker."""

    async def connect(self, request: pb.ConnectRequest, timeout_s: float) -> pb.ConnectResponse:
        """Meet a decode worker. Raises AioRpcError."""


Pair = tuple[str, str, str, str]
"""Address and generation of the prefill worker, then of the decode worker."""


class Introductions:
    """One introduction a pair of processes; a restarted worker is another process. Failures are tried again, ever slower.

    A pair has met when contracts agree and bytes that one wrote have arrived at the other. No request waits for that: one
    that comes first has its two workers meet by itself.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change` hears of every pair that has met, or failed to."""
        self._on_change = on_change
        self._tasks: dict[Pair, asyncio.Task[None]] = {}
        self._met: set[Pair] = set()
        self._failures: dict[Pair, str] = {}
        """Why pairs have not met, as the last try says."""

    def update(self, prefills: Iterable[Introducer], decodes: Iterable[Known]) -> None:
        """Begin what is new and give up what is over. To be called when a worker came, went or restarted."""
        there = [decode for decode in decodes if _is_there(decode)]
        wanted = {
            _pair(prefill, decode): prefill
            for prefill in prefills
            if _is_there(prefill)
            for decode in there
        }
        for pair in self._tasks.keys() - wanted.keys():
            self._tasks.pop(pair).cancel()
            self._met.discard(pair)
            self._failures.pop(pair, None)
        for pair in wanted.keys() - self._tasks.keys():
            self._begin(wanted[pair], pair)

    def doubt(self, prefill: Introducer, decode: Known) -> None:
        """A hand-off between them failed: they are to meet once more, and until that fails they count as before."""
        pair = _pair(prefill, decode)
        if pair in self._tasks and self._tasks[pair].done():
            self._begin(prefill, pair)

    def why_none_met(self, prefills: Iterable[Known], decodes: Iterable[Known]) -> str | None:
        """None when a prefill worker of the first has met a decode worker of the second; else why no two have."""
        there = list(decodes)
        pairs = [_pair(prefill, decode) for prefill in prefills for decode in there]
        if any(pair in self._met for pair in pairs):
            return None
        failures = [f"{p[0]} and {p[2]}: {self._failures[p]}" for p in pairs if p in self._failures]
        return "; ".join(["no prefill worker has met a decode worker yet", *failures])

    def has_failed(self, prefill: Known, decode: Known) -> bool:
        """Whether these two processes did not meet when they last tried; False before that, and when they have met."""
        return _pair(prefill, decode) in self._failures

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, prefill: Introducer, pair: Pair) -> None:
        self._tasks[pair] = asyncio.create_task(self._introduce(prefill, pair))

    async def _introduce(self, prefill: Introducer, pair: Pair) -> None:
        _, _, decode_address, decode_generation = pair
        request = pb.ConnectRequest(
            decode_address=decode_address, decode_generation=decode_generation
        )
        retry_s = FIRST_RETRY_S
        while not await self._try(prefill, pair, request):
            await asyncio.sleep(retry_s)
            retry_s = min(LONGEST_RETRY_S, 2 * retry_s)
        self._failures.pop(pair, None)
        self._met.add(pair)
        self._on_change()

    async def _try(self, prefill: Introducer, pair: Pair, request: pb.ConnectRequest) -> bool:
        try:
            met = await prefill.connect(request, CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return True  # an older prefill worker meets peers when it needs them
            why = error_of_call(error, peer=prefill.address).message
            is_news = self._failures.get(pair) != why
            self._failures[pair] = why
            self._met.discard(pair)
            self._on_change()
            logger.log(
                logging.WARNING if is_news else logging.DEBUG,
                "%s has not met %s: %s",
                prefill.address,
                request.decode_address,
                why,
            )
            return False
        logger.info(
            "%s hands over to %s by %s: %s",
            prefill.address,
            request.decode_address,
            met.transfer_engine,
            met.reason,
        )
        return True


def _pair(prefill: Known, decode: Known) -> Pair:
    return prefill.address, prefill.generation, decode.address, decode.generation


def _is_there(worker: Known) -> bool:
    return worker.state in (WorkerState.READY, WorkerState.DRAINING)
