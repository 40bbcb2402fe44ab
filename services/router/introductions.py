"""Has every prefill worker meet every decode worker before a request needs the two. Knows pairs; no requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

import grpc
import grpc.aio

from common.rpc.status import error_of_call
from dspark.v1 import prefill_service_pb2 as pb
from services.router.policy import WorkerState

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 15.0
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 30.0


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

    Nothing waits for an introduction: a request that comes first has the two workers meet by itself.
    """

    def __init__(self) -> None:
        self._tasks: dict[Pair, asyncio.Task[None]] = {}

    def update(self, prefills: Iterable[Introducer], decodes: Iterable[Known]) -> None:
        """Begin what is new and give up what is over. To be called when a worker came, went or restarted."""
        there = [decode for decode in decodes if _is_there(decode)]
        wanted = {
            (prefill.address, prefill.generation, decode.address, decode.generation): prefill
            for prefill in prefills
            if _is_there(prefill)
            for decode in there
        }
        for pair in self._tasks.keys() - wanted.keys():
            self._tasks.pop(pair).cancel()
        for pair in wanted.keys() - self._tasks.keys():
            self._tasks[pair] = asyncio.create_task(_introduce(wanted[pair], pair))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_there(worker: Known) -> bool:
    return worker.state in (WorkerState.READY, WorkerState.DRAINING)


async def _introduce(prefill: Introducer, pair: Pair) -> None:
    _, _, decode_address, decode_generation = pair
    request = pb.ConnectRequest(decode_address=decode_address, decode_generation=decode_generation)
    retry_s = FIRST_RETRY_S
    while True:
        try:
            met = await prefill.connect(request, CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return  # an older prefill worker meets peers when it needs them
            why = error_of_call(error, peer=prefill.address).message
            logger.warning("%s has not met %s: %s", prefill.address, decode_address, why)
        else:
            logger.info(
                "%s hands over to %s by %s: %s",
                prefill.address,
                decode_address,
                met.transfer_engine,
                met.reason,
            )
            return
        await asyncio.sleep(retry_s)
        retry_s = min(LONGEST_RETRY_S, 2 * retry_s)
