"""Which writes go wrong, and how. Knows counts and kinds; the engine that obeys is `faulty_engine`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from common.errors import ConfigError


class FaultKind(enum.Enum):
    """What happens to one write."""

    FAIL = "fail"
    """Moves nothing and fails."""
    DELAY = "delay"
    """Begins `value` seconds late."""
    DROP = "drop"
    """Moves everything; its completion is lost."""
    DUPLICATE = "duplicate"
    """Moves everything twice."""
    CORRUPT = "corrupt"
    """Another byte arrives in place of its first one."""
    STALL = "stall"
    """Moves nothing, does not end, and cannot be proven to have stopped the first `value` times that it is asked; it lands
    after all when it is asked the last time."""
    DIE = "die"
    """The process ends at once, nothing being told to anybody."""


_DEFAULT_VALUE = {FaultKind.DELAY: 1.0, FaultKind.STALL: 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One write that goes wrong."""

    kind: FaultKind
    write: int
    """Counted from 1 over all hand-offs of the process."""
    value: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """At most one fault a write."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """`kind:write` or `kind:write:value`, with commas between: "corrupt:3,delay:4:0.5". Raises ConfigError."""
        faults = tuple(_fault(part.strip()) for part in text.split(",") if part.strip())
        writes = [fault.write for fault in faults]
        for write in writes:
            if writes.count(write) > 1:
                raise ConfigError(f"faults {text!r}: write {write} has two faults; give it one")
        return cls(faults=faults)

    def of(self, write: int) -> Fault | None:
        return next((fault for fault in self.faults if fault.write == write), None)


def _fault(text: str) -> Fault:
    name, _, rest = text.partition(":")
    number, _, value = rest.partition(":")
    try:
        kind = FaultKind(name)
    except ValueError:
        kinds = ", ".join(kind.value for kind in FaultKind)
        raise ConfigError(f"fault {text!r}: {name!r} is not one of {kinds}") from None
    try:
        fault = Fault(
            kind=kind,
            write=int(number),
            value=float(value) if value else _DEFAULT_VALUE.get(kind, 0.0),
        )
    except ValueError:
        raise ConfigError(f"fault {text!r} is not kind:write or kind:write:value") from None
    if fault.write < 1 or not 0 <= fault.value < float("inf"):
        raise ConfigError(f"fault {text!r}: writes count from 1, and values from 0")
    if value and kind not in _DEFAULT_VALUE:
        raise ConfigError(f"fault {text!r}: {kind.value} takes no value")
    return fault
