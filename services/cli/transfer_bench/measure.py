"""The measurement itself: every engine in every pattern by turns with memcpy and raw TCP. Knows order and clocks."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from common.errors import ServingError
from common.transfer.engine import TransferEngine, WriteTarget
from common.transfer.handoff import HandoffKey
from common.transfer.ranges import ByteRanges
from common.types import RequestId
from services.cli.failures import EXIT_OTHER, Failure
from services.cli.transfer_bench.endpoint import Endpoint
from services.cli.transfer_bench.patterns import Pattern, size_name
from services.cli.transfer_bench.protocol import Opening
from services.cli.transfer_bench.raw_tcp import RawTcpSender
from services.cli.transfer_bench.remote import Remote, open_remote
from services.cli.transfer_bench.request import Request
from services.cli.transfer_bench.results import Rate, Results, Sample

Say = Callable[[str], None]

CONNECT_S = 5.0
WRITE_S = 60.0
_KEY = HandoffKey(
    request_id=RequestId("bench"), epoch=0, reservation_id="bench", prefill_generation="bench"
)


async def measure(request: Request, address: str, *, is_one_host: bool, say: Say) -> Results:
    """Write to the receiver at an address. Raises Failure when it is not there or other bytes arrive than were sent."""
    size_bytes = max(pattern.size_bytes for pattern in request.patterns)
    opening = Opening(engines=request.engines, size_bytes=size_bytes)
    async with open_remote(address, opening) as remote:
        endpoint = Endpoint(opening, host=_own_host(remote.host))
        try:
            tcp = await asyncio.to_thread(RawTcpSender, remote.host, remote.receiver.tcp_port)
            try:
                run = _Run(request, endpoint, remote, tcp, say)
                await run.connect()
                await run.measure()
            finally:
                tcp.close()
        finally:
            await endpoint.close()
    return run.results(is_one_host=is_one_host)


class _Run:
    """One measurement, in its order."""

    def __init__(
        self, request: Request, endpoint: Endpoint, remote: Remote, tcp: RawTcpSender, say: Say
    ) -> None:
        self._request = request
        self._endpoint = endpoint
        self._remote = remote
        self._tcp = tcp
        self._say = say
        self._copy = np.ones_like(endpoint.bytes)
        self._engines: dict[str, TransferEngine] = {}
        self._missing = endpoint.missing | remote.receiver.missing
        self._memcpy: dict[int, list[Sample]] = defaultdict(list)
        self._raw_tcp: dict[int, list[Sample]] = defaultdict(list)
        self._samples: dict[str, dict[Pattern, list[Sample]]] = defaultdict(
            lambda: defaultdict(list)
        )
        generator = np.random.default_rng()
        endpoint.bytes[:] = generator.integers(0, 256, len(endpoint.bytes), np.uint8)

    async def connect(self) -> None:
        """Meet the receiver by every engine that both ends have."""
        descriptors = {each.name: each for each in self._remote.receiver.descriptors}
        for name, engine in self._endpoint.engines.items():
            if name not in descriptors:
                continue
            try:
                await engine.connect(
                    self._remote.grpc_address, descriptors[name], timeout_s=CONNECT_S
                )
            except ServingError as error:
                self._missing[name] = error.message
            else:
                self._engines[name] = engine

    async def measure(self) -> None:
        for size_bytes, group in itertools.groupby(
            self._request.patterns, key=lambda pattern: pattern.size_bytes
        ):
            patterns = list(group)
            self._say(f"{size_name(size_bytes)}: comparing what arrives with what was sent")
            for pattern in patterns:
                for name in list(self._engines):
                    await self._verify(name, pattern)
            self._say(f"{size_name(size_bytes)}: measuring {self._request.repeats} times")
            # By turns, so that whatever else the machine does falls on all.
            for _ in range(self._request.repeats):
                await self._measure_links(size_bytes)
                for pattern in patterns:
                    for name in list(self._engines):
                        await self._measure_engine(name, pattern)

    def results(self, *, is_one_host: bool) -> Results:
        return Results(
            is_one_host=is_one_host,
            memcpy={size: Rate.of(size, samples) for size, samples in self._memcpy.items()},
            raw_tcp={size: Rate.of(size, samples) for size, samples in self._raw_tcp.items()},
            engines={
                name: {
                    pattern: Rate.of(pattern.size_bytes, samples)
                    for pattern, samples in self._samples[name].items()
                }
                for name in self._engines
            },
            missing=self._missing,
        )

    async def _verify(self, name: str, pattern: Pattern) -> None:
        """Also what warms the engine up for this pattern."""
        ranges = pattern.ranges()
        await self._remote.clear()
        if not await self._write(name, pattern, ranges):
            return
        sent = await asyncio.to_thread(self._endpoint.digest_source, ranges)
        if sent != await self._remote.digest(pattern):
            raise Failure(
                f"{name} delivered other bytes than were sent ({pattern.name})",
                exit_code=EXIT_OTHER,
            )

    async def _measure_links(self, size_bytes: int) -> None:
        source = self._endpoint.bytes[:size_bytes]

        def copy() -> None:
            np.copyto(self._copy[:size_bytes], source)

        self._memcpy[size_bytes].append(await asyncio.to_thread(_timed, copy))
        send = await asyncio.to_thread(_timed, lambda: self._tcp.send(source))
        self._raw_tcp[size_bytes].append(send)

    async def _measure_engine(self, name: str, pattern: Pattern) -> None:
        ranges = pattern.ranges()
        theirs, ours = await self._remote.cpu_s(), time.process_time()
        began = time.perf_counter()
        if not await self._write(name, pattern, ranges):
            return
        seconds = time.perf_counter() - began
        sample = Sample(
            seconds=seconds,
            sender_cpu_s=time.process_time() - ours,
            receiver_cpu_s=await self._remote.cpu_s() - theirs,
        )
        self._samples[name][pattern].append(sample)

    async def _write(self, name: str, pattern: Pattern, ranges: ByteRanges) -> bool:
        """False when the engine cannot, which ends its part in this run."""
        engine = self._engines[name]
        target = WriteTarget(
            address=self._remote.grpc_address,
            key=_KEY,
            capability=self._remote.receiver.capability,
        )
        try:
            transfer = engine.write(target, ranges)
            if await engine.poll(transfer, timeout_s=WRITE_S):
                return True
            why = f"{pattern.name} did not arrive in {WRITE_S:.0f} s"
        except ServingError as error:
            why = error.message
        del self._engines[name]
        self._missing[name] = why
        return False


def _timed(work: Callable[[], None]) -> Sample:
    began = time.perf_counter()
    work()
    return Sample(seconds=time.perf_counter() - began)


def _own_host(peer_host: str) -> str:
    """This machine's address on the way to a peer; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer_host, 9))
        return str(probe.getsockname()[0])
