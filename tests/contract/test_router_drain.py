"""A router that is to stop finishes what runs and takes no more; over sockets, with scripted workers."""

from __future__ import annotations

import asyncio

from tests.support.router_cluster import (
    SEQUENCE,
    STOP,
    Cluster,
    collect,
    error_of,
    generate_request,
    tokens_of,
)
from tests.support.waiting import WAIT_S


async def test_running_requests_finish_and_new_ones_are_refused(system: Cluster) -> None:
    system.decode.round_gate.clear()
    call = system.stub.Generate(generate_request(stop=STOP))
    first = await anext(aiter(call))
    system.stop.set()
    while True:
        error = await error_of(system.stub.Generate(generate_request(model="x", stop=STOP)))
        if error.reason == "DRAINING":
            break
        await asyncio.sleep(0)
    system.decode.round_gate.set()
    assert tokens_of([first, *await collect(call)]) == SEQUENCE[:30]
    async with asyncio.timeout(WAIT_S):
        await system.serving
