"""What our engine makes of NIXL: the same blocks by NIXL's own calls and by the engine, by turns, between two processes.

`python -m benchmarks.bare_nixl` prints JSON. Bare means: no event loop, no other thread, and a core that does nothing but
ask whether the write has ended. Both are timed from the ranges, as each takes them, to the last byte's arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from common.config import limit_threads
from common.errors import TransferFailed
from common.transfer.engine import WriteTarget
from common.transfer.handoff import HandoffKey
from common.transfer.meeting import EngineDescriptor
from common.transfer.nixl_library import NixlLibrary
from common.transfer.ranges import ByteRange, ByteRanges
from common.types import RequestId
from services.cli.process import leave
from services.cli.transfer_bench.endpoint import Endpoint
from services.cli.transfer_bench.patterns import Pattern, parse_patterns
from services.cli.transfer_bench.protocol import Opening

SIZES = ("4MiB", "64MiB", "256MiB")
RANGES = ("1", "64", "1024")
TURN_BYTES = 64 << 20
"""Smaller writes are measured more often in a turn, for a median of a few says little of what takes half a millisecond."""
WAIT_S = 60.0
LOOK_PERIOD_S = 0.001
"""As often as the engine's receiver looks."""
TARGET = WriteTarget(
    address="receiver:1",
    key=HandoffKey(
        request_id=RequestId("bench"), epoch=0, reservation_id="bench", prefill_generation="bench"
    ),
    capability=b"",
)


class BareAgent:
    """NIXL as a script would use it, over the memory of an endpoint."""

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self._agent = NixlLibrary().agent(name)
        self._address = endpoint.memory.tensors[0].data_ptr()
        self._agent.register_memory(endpoint.memory.tensors[0])
        self._peer: Any = None
        self._peer_address = 0

    def introduction(self) -> dict[str, Any]:
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self._address}

    def meet(self, introduction: dict[str, Any]) -> None:
        self._peer = self._agent.add_remote_agent(base64.b64decode(introduction["metadata"]))
        self._peer_address = int(introduction["address"])

    def write(self, ranges: Sequence[ByteRange]) -> None:
        """Returns when every byte has arrived."""
        agent = self._agent
        ours = [(self._address + r.source_offset, r.length, 0) for r in ranges]
        theirs = [(self._peer_address + r.destination_offset, r.length, 0) for r in ranges]
        handle = agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs(np.array(ours, dtype=np.uint64), "DRAM"),
            agent.get_xfer_descs(np.array(theirs, dtype=np.uint64), "DRAM"),
            self._peer,
        )
        state, deadline = agent.transfer(handle), time.monotonic() + WAIT_S
        while state == "PROC" and time.monotonic() < deadline:
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferFailed(f"bare nixl: the write ended as {state}")

    async def look(self) -> None:
        """What the receiving end has to do for a connection to come about, for ever."""
        while True:
            self._agent.get_new_notifs()
            await asyncio.sleep(LOOK_PERIOD_S)


class Posting:
    """How long an engine takes before NIXL has the write."""

    def __init__(self) -> None:
        self.began = 0.0
        """To be set when the engine is called, on the clock of `time.perf_counter`."""
        self.seconds = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Of engines that are made in this block."""
        make = NixlLibrary.agent

        def agent(library: NixlLibrary, name: str) -> Any:
            made = make(library, name)
            transfer = made.transfer

            def timed_transfer(handle: Any) -> str:
                self.seconds = time.perf_counter() - self.began
                return str(transfer(handle))

            made.transfer = timed_transfer
            return made

        with mock.patch.object(NixlLibrary, "agent", agent):
            yield


class Receiver:
    """The other process."""

    def __init__(self, size_bytes: int) -> None:
        command = (sys.executable, "-m", "benchmarks.bare_nixl", "--receive", str(size_bytes))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.introduction: dict[str, Any] = self.ask("")

    def ask(self, pattern: str) -> Any:
        """With a pattern's "size ranges": the digest of what arrived, which is then cleared."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        if pattern:
            process.stdin.write(pattern + "\n")
            process.stdin.flush()
        return json.loads(process.stdout.readline())

    def close(self) -> None:
        """It ends with its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WAIT_S)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare_nixl", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    parser.add_argument("--receive", type=int, default=0, help="be the receiver of so many bytes")
    options = parser.parse_args()
    limit_threads(1)
    if options.receive:
        asyncio.run(_receive(options.receive))
    else:
        print(json.dumps(asyncio.run(_measure(options.repeats))), flush=True)
    leave(0)  # libraries of engines may crash when theirs ends


async def _measure(repeats: int) -> dict[str, float]:
    patterns = parse_patterns(SIZES, RANGES)
    size_bytes = max(pattern.size_bytes for pattern in patterns)
    receiver = Receiver(size_bytes)
    posting = Posting()
    with posting.timed():
        endpoint = Endpoint(Opening(engines=("nixl",), size_bytes=size_bytes), host="127.0.0.1")
    endpoint.bytes[:] = np.random.default_rng().integers(0, 256, len(endpoint.bytes), np.uint8)
    engine, bare = endpoint.engines["nixl"], BareAgent(endpoint, "bare-sender")
    bare.meet(receiver.introduction["bare"])
    await engine.connect(
        TARGET.address, _descriptor(receiver.introduction["engine"]), timeout_s=WAIT_S
    )

    async def by_engine(ranges: ByteRanges) -> None:
        posting.began = time.perf_counter()
        if not await engine.poll(engine.write(TARGET, ranges), timeout_s=WAIT_S):
            raise TransferFailed(f"nixl: the write did not end in {WAIT_S} s")

    async def by_hand(ranges: Sequence[ByteRange]) -> None:
        bare.write(ranges)

    seconds: dict[tuple[Pattern, str], list[float]] = defaultdict(list)
    for turn in range(repeats):
        for pattern in patterns:
            ranges = pattern.ranges()
            writes = (
                ("engine", partial(by_engine, ranges)),
                ("bare", partial(by_hand, list(ranges))),
            )
            # Neither finds in a cache what the other has left there for it.
            for _, write in writes:
                await write()
                if turn == 0:
                    _require_arrived(endpoint, receiver, pattern, ranges)
            for name, write in writes * max(1, TURN_BYTES // pattern.size_bytes):
                began = time.perf_counter()
                await write()
                seconds[pattern, name].append(time.perf_counter() - began)
                if name == "engine":
                    seconds[pattern, "posting"].append(posting.seconds)
    receiver.close()
    return ratio_figures({key: statistics.median(values) for key, values in seconds.items()})


def _require_arrived(
    endpoint: Endpoint, receiver: Receiver, pattern: Pattern, ranges: ByteRanges
) -> None:
    found = receiver.ask(f"{pattern.size_bytes} {pattern.num_ranges}")
    if found != endpoint.digest_source(ranges):
        raise TransferFailed(f"other bytes arrived than were sent ({pattern.name})")


def ratio_figures(seconds: dict[tuple[Pattern, str], float]) -> dict[str, float]:
    """Of the time that each transfer takes by the engine and bare: how fast NIXL is, what share of it is left, and what
    share of the engine's time passes before NIXL has the write."""
    figures: dict[str, float] = {}
    for (pattern, name), median_s in seconds.items():
        engine_s = seconds[pattern, "engine"]
        if name == "bare":
            figures[f"nixl.{pattern.name}.bare_bytes_per_s"] = pattern.size_bytes / median_s
            figures[f"nixl.{pattern.name}.over_bare"] = median_s / engine_s
        if name == "posting":
            figures[f"nixl.{pattern.name}.posting_share"] = median_s / engine_s
    return figures


async def _receive(size_bytes: int) -> None:
    endpoint = Endpoint(Opening(engines=("nixl",), size_bytes=size_bytes), host="127.0.0.1")
    engine, bare = endpoint.engines["nixl"], BareAgent(endpoint, "bare-receiver")
    stop, looking = engine.receive(), asyncio.create_task(bare.look())
    descriptor = asdict(engine.descriptor)
    descriptor["endpoint"] = base64.b64encode(engine.descriptor.endpoint).decode()
    print(json.dumps({"engine": descriptor, "bare": bare.introduction()}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        size, num_ranges = map(int, line.split())
        ranges = Pattern(size_bytes=size, num_ranges=num_ranges).ranges()
        digest = endpoint.digest_destination(ranges)
        endpoint.bytes.fill(0)
        print(json.dumps(digest), flush=True)
    looking.cancel()
    stop()


def _descriptor(fields: dict[str, Any]) -> EngineDescriptor:
    endpoint = base64.b64decode(fields["endpoint"])
    addresses = tuple(fields["region_addresses"])
    return EngineDescriptor(**(fields | {"endpoint": endpoint, "region_addresses": addresses}))


if __name__ == "__main__":
    sys.exit(main())
