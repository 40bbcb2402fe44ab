"""What a plan of faults says, and what is refused before anything is served with it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from common.errors import ConfigError, TransferFailed
from common.transfer.engine import WriteTarget
from common.transfer.engines import Engines
from common.transfer.faults import Fault, FaultKind, FaultPlan
from common.transfer.faulty_engine import with_faults
from common.transfer.handoff import HandoffKey
from common.transfer.ranges import ByteRanges
from common.types import RequestId


def test_a_plan_names_writes_and_what_happens_to_them() -> None:
    plan = FaultPlan.parse("corrupt:3, delay:4:0.5,stall:5,,die:6")
    assert plan.of(3) == Fault(kind=FaultKind.CORRUPT, write=3)
    assert plan.of(4) == Fault(kind=FaultKind.DELAY, write=4, value=0.5)
    assert plan.of(5) == Fault(kind=FaultKind.STALL, write=5, value=1.0)
    assert plan.of(6) == Fault(kind=FaultKind.DIE, write=6)
    assert plan.of(1) is None
    assert FaultPlan.parse("") == FaultPlan()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("explode:3", "'explode' is not one of fail, delay, drop, duplicate, corrupt, stall, die"),
        ("corrupt", "is not kind:write"),
        ("corrupt:x", "is not kind:write"),
        ("delay:1:soon", "is not kind:write"),
        ("corrupt:0", "writes count from 1"),
        ("delay:1:-2", "values from 0"),
        ("delay:1:inf", "values from 0"),
        ("drop:2:5", "drop takes no value"),
        ("drop:2,fail:2", "write 2 has two faults"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_with_the_part_that_is_wrong(
    text: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        FaultPlan.parse(text)


TARGET = WriteTarget(
    address="decode:1",
    key=HandoffKey(request_id=RequestId("r"), epoch=0, reservation_id="s", prefill_generation="g"),
    capability=b"",
)


class InstantEngine:
    """Has written everything at once."""

    is_one_sided = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_writes = 0

    def write(self, target: Any, ranges: Any) -> Any:
        self.num_writes += 1
        return self.num_writes

    async def poll(self, transfer: Any, *, timeout_s: float) -> bool:
        return True

    async def close(self) -> None:
        """Nothing is open."""


async def test_writes_are_counted_over_all_engines_of_a_process() -> None:
    """A worker that falls back in the middle of a drill would otherwise begin to count anew."""
    inner = {name: InstantEngine(name) for name in ("nixl", "grpc")}
    engines = Engines(choice="auto", wanted="nixl", by_name=cast(Any, inner), missing={})
    faulty = with_faults(engines, FaultPlan.parse("fail:3"), cast(Any, None))
    ends = []
    for name in ("nixl", "grpc", "nixl", "grpc"):
        engine = faulty.by_name[name]
        try:
            ends.append(await engine.poll(engine.write(TARGET, ByteRanges.of([])), timeout_s=5.0))
        except TransferFailed:
            ends.append(False)
    assert ends == [True, True, False, True]
    assert [engine.num_writes for engine in inner.values()] == [1, 2]
    await asyncio.gather(*(engine.close() for engine in faulty.by_name.values()))
