"""What a plan of faults says, and what is refused before anything is served with it."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.transfer.faults import Fault, FaultKind, FaultPlan


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
