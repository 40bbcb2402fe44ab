"""A request whose time is over ends on both legs, whoever set the bound; over sockets, with scripted workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.chat_tokenizer import write_tokenizer
from tests.support.fake_workers import FakeDecode, FakePrefill
from tests.support.router_cluster import (
    SEQUENCE,
    STOP,
    Cluster,
    cluster,
    error_of,
    generate_request,
    router_config,
)

TIMES_S = (0.3, 3.0, 30.0)
"""Of requests that are to end in the middle: a busy machine may need more than the first to get them there."""


async def test_while_prefilling_ends_both_legs(system: Cluster) -> None:
    system.prefill.start_gate.clear()
    for time_s in TIMES_S:
        request = generate_request(request_id=f"r{time_s}", stop=STOP)
        error = await error_of(system.stub.Generate(request, timeout=time_s))
        assert error.kind.value == "deadline_exceeded"
        if system.prefill.prefills:
            break
    await system.prefill.seen.until(lambda: system.prefill.cancelled == [request.request_id])
    await system.decode.seen.until(
        lambda: request.request_id in {abort.request_id for abort in system.decode.aborts}
    )


async def test_the_routers_own_bound_holds_without_a_clients(tmp_path: Path) -> None:
    stage = ""
    for time_s in TIMES_S:
        config = replace(router_config(write_tokenizer(tmp_path)), request_timeout_s=time_s)
        async with cluster(config, [FakePrefill(SEQUENCE)], [FakeDecode(SEQUENCE)]) as system:
            system.decode.round_gate.clear()
            error = await error_of(system.stub.Generate(generate_request(stop=STOP)))
            assert error.reason == "DEADLINE_EXCEEDED"
            stage = error.metadata["stage"]
            if stage == "decode":
                await system.decode.seen.until(lambda d=system.decode: bool(d.aborts))  # type: ignore[misc]
                break
    assert stage == "decode"
