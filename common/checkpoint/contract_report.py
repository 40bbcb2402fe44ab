"""What a contract found: tensors that are not as they must be, and those that nothing takes, by group. Knows names only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import CheckpointError

NAMES_SHOWN = 4
GROUPS_SHOWN = 8
EXPERT_ID = re.compile(r"\.ffn\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One tensor that is not as it must be."""

    name: str
    group: str
    kind: str
    """`missing`, `misshapen` or `wrongly typed`."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ExtraGroup:
    """Tensors that nothing takes, of one layer, its experts, or whatever their names begin with."""

    group: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        experts = _experts(self.names)
        more = len(self.names) - NAMES_SHOWN
        return (
            f"{self.group}: {len(self.names)}{f' ({experts})' if experts else ''}: "
            f"{', '.join(self.names[:NAMES_SHOWN])}{f' and {more} more' if more > 0 else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractReport:
    """What a contract found."""

    contract: str
    expected: dict[str, int]
    """Tensors by group, in the order of the model."""
    faults: tuple[Fault, ...] = ()
    extra: tuple[str, ...] = ()
    """Tensors that nothing takes, the classic MTP layer's not among them."""
    num_classic_mtp: int = 0
    """Tensors of a drafter that this server does not run."""
    notes: tuple[str, ...] = ()

    @property
    def num_expected(self) -> int:
        return sum(self.expected.values())

    @property
    def is_met(self) -> bool:
        return not self.faults

    def summary(self) -> str:
        """`85 of 123 tensors missing`, by kind."""
        if self.is_met:
            return f"all {self.num_expected} tensors are there"
        kinds = Counter(fault.kind for fault in self.faults)
        return ", ".join(
            f"{count} of {self.num_expected} tensors {kind}" for kind, count in kinds.items()
        )

    def by_group(self) -> Iterator[str]:
        """A line per group and kind: how many of how many, and the first names."""
        groups: dict[tuple[str, str], list[Fault]] = {}
        for fault in self.faults:
            groups.setdefault((fault.group, fault.kind), []).append(fault)
        for (group, kind), faults in groups.items():
            shown = [f"{f.name} {f.detail}".strip() for f in faults[:NAMES_SHOWN]]
            more = f" and {len(faults) - NAMES_SHOWN} more" if len(faults) > NAMES_SHOWN else ""
            experts = _experts(fault.name for fault in faults)
            yield (
                f"{group}: {len(faults)} of {self.expected[group]} {kind}"
                f"{f' ({experts})' if experts else ''}: {', '.join(shown)}{more}"
            )

    def extra_groups(self) -> tuple[ExtraGroup, ...]:
        """The same tensors as `extra`, by what they would belong to."""
        groups: dict[str, list[str]] = {}
        for name in self.extra:
            groups.setdefault(_group_of(name), []).append(name)
        return tuple(ExtraGroup(group, tuple(names)) for group, names in groups.items())

    def require_met(self, checkpoint_dir: Path) -> None:
        """Raise CheckpointError with the summary, the groups and the first tensor's name."""
        if self.is_met:
            return
        raise CheckpointError(
            f"the checkpoint {checkpoint_dir} does not fit its config.json: {self.summary()}: "
            f"{first_groups(self.by_group())}; `dspark checkpoint validate` lists everything",
            metadata={"tensor": self.faults[0].name, "faults": str(len(self.faults))},
        )


def first_groups(groups: Iterable[object]) -> str:
    """As much of a list of groups as one sentence can take."""
    lines = [str(group) for group in groups]
    more = len(lines) - GROUPS_SHOWN
    return "; ".join(lines[:GROUPS_SHOWN]) + (f"; and {more} more groups" if more > 0 else "")


def _group_of(name: str) -> str:
    """As the model's own tensors are counted: by layer or stage, with experts apart."""
    first, *rest = name.split(".")
    if first not in ("layers", "mtp") or not rest:
        return first
    return f"{first}.{rest[0]} experts" if EXPERT_ID.search(name) else f"{first}.{rest[0]}"


def _experts(names: Iterable[str]) -> str:
    """Whose experts' tensors these are, as ranges of ids."""
    ids = sorted({int(found[1]) for name in names if (found := EXPERT_ID.search(name))})
    if not ids:
        return ""
    ranges: list[list[int]] = []
    for e in ids:
        if ranges and ranges[-1][1] == e - 1:
            ranges[-1][1] = e
        else:
            ranges.append([e, e])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:6]]
    more = ", …" if len(ranges) > 6 else ""
    return f"expert{'s' if len(ids) > 1 else ''} {', '.join(shown)}{more}"
